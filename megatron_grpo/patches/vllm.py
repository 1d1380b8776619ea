"""Names of vLLM that this project replaces; each file in ``by`` has what takes the place."""

from megatron_grpo.patches.replacement import Replacement, Sources, entries_of

INSPECTION = Replacement(
    "vllm.model_executor.models.registry:_run_in_subprocess",
    "fn",
    "Inspect the model's class in this process, where CUDA has started anyway, and not in another one of each rank.",
    by="megatron_grpo/rollout/vllm/colocate.py",
    proof="first start of the engine on an H200 host: 28 s longer without it",
)
LOG_PROBS = Replacement(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    "self, scheduler_output, model_runner_output",
    "Take the log-probabilities of a step's sampled tokens from one list; vLLM slices three arrays for each request "
    "and step.",
    by="megatron_grpo/rollout/vllm/scheduler.py",
    proof="tests/unit/rollout/test_colocated_vllm.py::test_log_probs_go_to_the_requests_of_their_rows",
    scope="object",
)
DRAFT_COUNTS = Replacement(
    "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
    "self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id",
    "Count drafts and accepted tokens without vLLM's logging of statistics.",
    by="megatron_grpo/rollout/vllm/scheduler.py",
    proof="tests/distributed/test_speculative.py::test_drafts_are_those_of_the_model_that_drafts",
    scope="object",
    needed="--vllm-speculative-config",
)
VIDEOS = Replacement(
    "vllm.model_executor.models.llava_onevision:LlavaOnevisionForConditionalGeneration._process_video_pixels",
    "self, inputs",
    "Return a matrix for each video: vLLM's has one dimension more when it encodes videos of different lengths "
    "together, and its runner refuses it.",
    by="megatron_grpo/rollout/vllm/colocate.py",
    proof="tests/distributed/test_vision_environments.py::test_an_environment_with_videos_and_its_replay",
    needed="LLaVA-OneVision with videos",
)
DRAFT_TEMPERATURES = Replacement(
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    "x, cu_num_tokens, num_tokens, replace_from, replace_to",
    "Divide the logits of draft tokens by their temperatures: on a CPU vLLM 0.32 writes these into a copy.",
    by="megatron_grpo/rollout/vllm/colocate.py",
    proof="tests/distributed/test_speculative.py::test_samples_have_the_distribution_of_the_model",
    needed="--vllm-speculative-config on a CPU",
    until="vLLM divides them in place (the linked pull request was closed without a merge)",
    link="https://github.com/vllm-project/vllm/pull/42638",
)
DRAFT_TRUNCATION = Replacement(
    "vllm.v1.sample.rejection_sampler:apply_top_k_top_p",
    "logits, k, p",
    "Truncate the distributions of no draft tokens: on a CPU vLLM 0.32 fails with top-k in a step without drafts.",
    by="megatron_grpo/rollout/vllm/colocate.py",
    proof="tests/distributed/test_speculative.py::test_truncated_samples_have_their_distribution_and_kept_tokens",
    needed="--vllm-speculative-config on a CPU",
)
EXPERT_ROUTER = Replacement(
    "vllm.model_executor.layers.fused_moe.router.router_factory:CPURouter",
    None,
    "Choose experts by sigmoids without groups as by one group of all experts: vLLM 0.32 asserts softmax.",
    by="megatron_grpo/rollout/vllm/colocate.py",
    proof="tests/distributed/test_stream.py::test_streamed_weights_answer_like_those_from_files",
    needed="experts on a CPU",
)
SHARED_MEMORY = Replacement(
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
    "communicator",
    "Name the files in /dev/shm by the run: under torchrun all runs of a host would share them.",
    by="megatron_grpo/rollout/vllm/colocate.py",
    proof="tests/unit/rollout/test_colocated_vllm.py::test_runs_of_a_host_share_no_memory",
    needed="a CPU",
)
EXECUTE_MODEL = Replacement(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    None,  # a version has more; `DECODE_RUNNER` knows the sources
    "Launch the forward passes of a decode step's tokens by two launches each; vLLM launches a dozen from Python.",
    by="megatron_grpo/rollout/vllm/decode_runner.py",
    proof="tests/gpu/test_engine.py::test_short_decode_steps_sample_the_same",
    scope="object",
    needed="vLLM 0.26 on a GPU",
)
SAMPLE_TOKENS = Replacement(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
    None,
    "Sample after a decode step's last forward pass by one CUDA graph; vLLM launches some twenty kernels from Python.",
    by="megatron_grpo/rollout/vllm/decode_runner.py",
    proof="tests/gpu/test_engine.py::test_short_decode_steps_sample_the_same",
    scope="object",
    needed="vLLM 0.26 on a GPU",
)
TOKEN_LOG_PROBS = Replacement(
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
    "logits, token_ids",
    "Compute log-probabilities by several programs a row: vLLM's kernel has one, which takes as long for a few rows as "
    "for hundreds. With --exact-log-probs the trainer calls the same kernel.",
    by="megatron_grpo/rollout/vllm/decode_runner.py",
    proof="tests/gpu/test_exact.py::test_a_run_has_no_mismatch",
    needed="--exact-log-probs, or vLLM 0.26 on a GPU",
)
GUMBEL_SAMPLE = Replacement(
    "vllm.v1.worker.gpu.sample.sampler:gumbel_sample",
    None,  # 0.32 has others; `DECODE_RUNNER` knows the sources
    "Sample by one random number a row: vLLM's kernel draws one for each token of the vocabulary.",
    by="megatron_grpo/rollout/vllm/decode_runner.py",
    proof="tests/gpu/test_engine.py::test_short_decode_steps_sample_the_same",
    needed="vLLM 0.26 on a GPU",
)
DECODE_STEPS = Sources(
    "vllm/v1",
    "core/block_pool.py core/kv_cache_coordinator.py core/kv_cache_manager.py core/kv_cache_utils.py "
    "core/sched/async_scheduler.py core/sched/output.py core/sched/scheduler.py core/sched/utils.py "
    "core/single_type_kv_cache_manager.py engine/core.py engine/core_client.py engine/detokenizer.py "
    "engine/llm_engine.py engine/logprobs.py engine/output_processor.py outputs.py request.py",
    {"0.26": "76fd166917f937c5", "0.32": "718de5460694ba43", "0.33": "0e1bb84a8aeb6eab"},
    "schedule and record a step in which every running request decodes, in one loop",
    by="megatron_grpo/rollout/vllm/decode_steps.py",
    proof="tests/unit/rollout/test_decode_steps.py",
)
DECODE_RUNNER = Sources(
    "vllm",
    "model_executor/layers/logits_processor.py v1/outputs.py v1/worker/gpu/async_utils.py v1/worker/gpu/attn_utils.py "
    "v1/worker/gpu/block_table.py v1/worker/gpu/buffer_utils.py v1/worker/gpu/cudagraph_utils.py "
    "v1/worker/gpu/eplb_utils.py v1/worker/gpu/input_batch.py v1/worker/gpu/kv_connector.py "
    "v1/worker/gpu/lora_utils.py v1/worker/gpu/model_runner.py v1/worker/gpu/model_states/default.py "
    "v1/worker/gpu/model_states/interface.py v1/worker/gpu/sample/bad_words.py v1/worker/gpu/sample/gumbel.py "
    "v1/worker/gpu/sample/logit_bias.py v1/worker/gpu/sample/logprob.py v1/worker/gpu/sample/penalties.py "
    "v1/worker/gpu/sample/sampler.py v1/worker/gpu/sample/states.py v1/worker/gpu/states.py v1/worker/gpu_worker.py "
    "v1/worker/lora_model_runner_mixin.py",
    {"0.26": "a3d9c8805ea3fa1b"},
    "run a step in which every running request decodes, by a few launches a token",
    by="megatron_grpo/rollout/vllm/decode_runner.py",
    proof="tests/gpu/test_engine.py::test_short_decode_steps_sample_the_same",
)
DECODE_ATTENTION = Sources(
    "vllm/v1/attention",
    "backend.py backends/flash_attn.py backends/registry.py selector.py",
    {"0.26": "f02888a329212127"},
    "attend in decode steps by a kernel of ours",
    by="megatron_grpo/rollout/vllm/decode_attention.py",
    proof="tests/gpu/test_kernels.py::test_attention_of_decode_steps",
)

ENTRIES = entries_of(globals())
