"""Every metric is explained, has a remedy, and is in docs/metrics.md."""

import importlib.util
import re
from pathlib import Path

from megatron_grpo.observability.metric_guide import HEADINGS, METRICS, REMEDIES, heading, remedy
from megatron_grpo.training.arguments import build_parser

REPO = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("generate_metrics_doc", REPO / "tools" / "generate_metrics_doc.py")
generate_metrics_doc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate_metrics_doc)


def test_every_metric_has_a_remedy_and_a_heading():
    assert [name for name in METRICS if not remedy(name)] == []
    assert [name for name in METRICS if heading(name) == "Other"] == []


def test_every_remedy_is_of_a_metric():
    assert [name for name in REMEDIES if name not in METRICS and not name.endswith("/")] == []
    assert {name.partition("/")[0] for name in REMEDIES if "/" in name} <= HEADINGS.keys()


def test_remedies_name_flags_that_exist():
    known = set(build_parser()._option_string_actions) | {"--dry-run"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", " ".join(REMEDIES.values()))) - known == set()


def test_remedies_name_metrics_that_exist():
    named = re.findall(r"\b(?:reward|completion|clip|mismatch|eval)/\w+", " ".join(REMEDIES.values()))
    assert set(named) - set(METRICS) == set()


def test_the_document_is_up_to_date():
    document = (REPO / "docs" / "metrics.md").read_text()
    assert document == generate_metrics_doc.document(), "run python tools/generate_metrics_doc.py"
    assert all(f"\n| `{name}` | " in document for name in METRICS)
