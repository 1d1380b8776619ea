"""Example of a custom judge for --reward-model-plugin: a grade from 0 to 9.

vLLM's structured_outputs restricts the answer to this form, so every completion gets a grade.
"""

from megatron_grpo.rewards.registry import Sample
from megatron_grpo.rewards.reward_models.judge import register_judge

QUESTION = 'A pupil was asked: {prompt}\nThe pupil said: {completion}\nGrade that from 0 to 9, as in "Grade: 9".'


@register_judge("grade")
class Grade:
    """Judge whose reward is the grade divided by 9."""

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
