"""A judge of one's own for --reward-model-plugin: a grade from 0 to 9, whatever the model would rather say.

vLLM's structured_outputs lets it answer in this form and no other, so that no completion is without a grade.
"""

from megatron_grpo.rewards.registry import Sample
from megatron_grpo.rewards.reward_models.judge import register_judge

QUESTION = 'A pupil was asked: {prompt}\nThe pupil said: {completion}\nGrade that from 0 to 9, as in "Grade: 9".'


@register_judge("grade")
class Grade:
    """The grade divided by 9."""

    def request(self, sample: Sample) -> dict:
        question = QUESTION.format(prompt=sample.prompt, completion=sample.completion)
        return {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 16,
            "structured_outputs": {"regex": "Grade: [0-9]"},
        }

    def score(self, sample: Sample, answer: str) -> float:
        return int(answer.removeprefix("Grade: ")) / 9
