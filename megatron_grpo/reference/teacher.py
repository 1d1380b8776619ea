"""The teachers of a run: what the advantages, or the loss, need of them for each token of a rollout.

--teacher-kl-coef needs the log-probability of the sampled token, a loss that distils (--loss-type gkd) the distribution
at each token. Of the whole vocabulary a teacher sends its hidden states, and its output layer lies on the ranks of the
policy's, because a token of a 7B model has 7 kB of hidden state and 300 kB of 16-bit logits. With --gkd-logits-topk it
sends its k likely tokens, 8 k bytes.
"""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.routing import teacher_routes
from megatron_grpo.models import forward
from megatron_grpo.models.config import params_dtype
from megatron_grpo.models.divergence import Head
from megatron_grpo.reference.reference_model import ReferenceModel
from megatron_grpo.reference.teacher_server import TeacherServer
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.page_locked import host_copies
from megatron_grpo.weights import hf, model_weights

NO_HIDDEN = 0x7FFF  # bits of NaN in 16 bits, and twice in float32: a token that no pass has reached

Teacher = ReferenceModel | TeacherServer


def build_teachers(
    args: Namespace, teacher_args: Sequence[Namespace], model_provider: Callable, dataset: PromptDataset
) -> "Teachers | None":
    """Return the teachers of --teacher-load-hf (``teacher_args``) or --teacher-server; None without one. Collective."""
    flag = "--teacher-server" if args.teacher_server else "--teacher-load-hf"
    routes = teacher_routes(flag, args.teacher_server or args.teacher_load_hf)
    models: list[Teacher] = []
    for own in teacher_args:

        def load(chunks: forward.Model, own: Namespace = own) -> None:
            hf.load_hf(chunks, own, own.load_hf)

        models.append(ReferenceModel(own, model_provider, load))
    if args.teacher_server:
        models = [TeacherServer(args, url) for url in routes.values()]
    return Teachers(args, models, list(routes), dataset) if models else None


class Teachers:
    """One teacher of all rows, or one of each data_source."""

    def __init__(self, args: Namespace, models: Sequence[Teacher], sources: Sequence[str | None], dataset):
        """``dataset[row]`` has the data_source of a row; ``models`` [m] are the teachers of ``sources`` [m]."""
        self.args, self.models, self.dataset = args, models, dataset
        self._number_of = {source: number for number, source in enumerate(sources)}
        self._of_rows: dict[int, int] = {}
        self._heads: list[torch.Tensor] = []  # in host memory
        if args.gkd_beta is None:
            return
        for model in self._local():
            for chunk in map(unwrap_model, model.model):
                chunk.distribution = args.gkd_logits_topk or "hidden"
        if args.gkd_logits_topk is None and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            heads = [output_weight(args, own.args) for own in self._local()]
            self._heads = host_copies(heads, [head.dtype for head in heads])

    def _local(self) -> Iterator[ReferenceModel]:
        return (model for model in self.models if isinstance(model, ReferenceModel))

    def numbers(self, batch: RolloutBatch) -> np.ndarray:
        """Return which teacher each completion has, [n]."""
        if None in self._number_of:
            return np.zeros(batch.num_completions, np.int32)
        return np.array([self._of_row(int(row)) for row in batch.row_ids], np.int32)

    def _of_row(self, row: int) -> int:
        if row not in self._of_rows:
            prompt = self.dataset[row] if row < len(self.dataset) else None
            if prompt is None:
                raise GrpoError(
                    f"the rollout has a completion of row {row}, whose data_source selects its teacher, but "
                    f"--train-data-path has {len(self.dataset)} rows: give the files with which it was recorded"
                )
            self._of_rows[row] = self._number_of[prompt.row["data_source"]]
        return self._of_rows[row]

    def own_completions(self, batch: RolloutBatch) -> np.ndarray:
        """Return the completions of the rollout that this rank computes for a teacher."""
        numbers = self.numbers(batch)
        found = [np.zeros(0, np.int64)]
        for number, model in enumerate(self.models):
            if isinstance(model, ReferenceModel) and len(chosen := self._filled(model, numbers == number)):
                found.append(model.own_completions(batch, chosen))
        return np.concatenate(found)

    @staticmethod
    def _filled(model: ReferenceModel, mine: np.ndarray) -> np.ndarray:
        """Return the completions of one teacher, and as many others as fill whole micro-batches on all its ranks."""
        args, own = model.args, np.flatnonzero(mine)
        budget = args.max_tokens_per_microbatch or args.logprobs_max_tokens_per_microbatch
        unit = args.data_parallel_size * (1 if budget else args.micro_batch_size)
        return np.sort(np.concatenate([own, np.flatnonzero(~mine)[: -len(own) % unit]]))

    def add_to(self, batch: RolloutBatch, policy: forward.Model, forward_step: Callable) -> RolloutBatch:
        """Return the rollout with log-probabilities or distributions of its tokens under the teachers. Collective."""
        numbers, k = self.numbers(batch), self.args.gkd_logits_topk
        of_labels = batch.response_mask == 1
        several = {"teacher_numbers": numbers} if len(self.models) > 1 else {}
        if self.args.gkd_beta is None:
            found = self._rows(
                batch, numbers, policy, forward_step, np.full((len(batch.tokens), 2), np.nan, np.float32)
            )
            return replace(batch, teacher_log_probs=np.where(of_labels, found[:, 0], np.nan).astype(np.float32))
        if k is None:
            columns = max(own.args.hidden_size for own in self._local()) * params_dtype(self.args).itemsize // 2
            nothing = np.full((len(batch.tokens), columns), NO_HIDDEN, np.int16)
            return replace(batch, teacher_hidden=self._rows(batch, numbers, policy, forward_step, nothing), **several)
        nothing = np.full((len(batch.tokens), 2 * k + 1), np.nan, np.float32)
        found = self._rows(batch, numbers, policy, forward_step, nothing)
        ids = np.where(np.isnan(found[:, k + 1 :]), -1, found[:, k + 1 :]).astype(np.int32)
        return replace(
            batch, teacher_token_ids=ids, teacher_token_log_probs=np.ascontiguousarray(found[:, : k + 1]), **several
        )

    def _rows(
        self,
        batch: RolloutBatch,
        numbers: np.ndarray,
        policy: forward.Model,
        forward_step: Callable,
        nothing: np.ndarray,
    ) -> np.ndarray:
        """Return what the teachers say of their tokens, [total, columns]; ``nothing`` of other tokens."""
        result = nothing.copy()
        plain = replace(batch, routed_experts=None)  # a teacher routes by itself, not by the policy's experts
        for number, model in enumerate(self.models):
            mine = numbers == number
            if not mine.any():
                continue
            if isinstance(model, TeacherServer):
                found = model.rows(batch, np.flatnonzero(mine), nothing)
            else:
                columns = nothing.shape[1]
                if nothing.dtype == np.int16:
                    columns = model.args.hidden_size * params_dtype(model.args).itemsize // 2
                chosen = self._filled(model, mine)
                found = model.rows(plain, chosen, policy, forward_step, nothing[:, :columns])
            own = batch.token_positions(np.flatnonzero(mine))
            result[own, : found.shape[1]] = found[own]
        if result.dtype == np.int16:
            return result
        forward.check_computed(batch, result[:, 0])
        return forward.not_finite_as_nan(result)

    @contextlib.contextmanager
    def heads_on_device(self, policy: forward.Model) -> Iterator[None]:
        """Context of an update: the teachers' output layers lie on the device of the policy's."""
        chunk = unwrap_model(policy[-1])
        if self._heads:
            caps = [own.args.final_logit_softcapping for own in self._local()]
            heads = [weight.to(device(), non_blocking=True) for weight in self._heads]
            chunk.teacher_heads = [Head(*parts) for parts in zip(heads, caps, strict=True)]
        try:
            yield
        finally:
            chunk.teacher_heads = ()


def output_weight(args: Namespace, teacher: Namespace) -> torch.Tensor:
    """Return the rows of a teacher's output layer that this rank's shard of the policy's has, ``[rows, h]``.

    The rows are those of the policy's padding and tensor parallelism. They are read from the teacher's directory.
    """
    own = replaced(teacher, padded_vocab_size=args.padded_vocab_size)
    untied = teacher.untie_embeddings_and_output_weights
    name = "output_layer.weight" if untied else "embedding.word_embeddings.weight"
    weight = next(weight for weight in model_weights.table(own) if weight.name == name)
    rank, size = model_weights.tensor_parallel(weight)
    shard = torch.empty(weight.shard_shape(size), dtype=params_dtype(args))
    weight.fill(shard, rank, size, hf.open_weights(teacher.load_hf, teacher.model_family, teacher.mtp_num_layers).read)
    return shard
