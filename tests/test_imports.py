"""Who may import whom, and which modules stay free of torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "eval": {"pipelines", "cacheblend", "kvstore", "retrieval", "inputs"},
    "pipelines": {"cacheblend", "kvstore", "retrieval", "inputs"},
    "cacheblend": {"kvstore"},
    "kvstore": set(),
    "retrieval": set(),
    "inputs": set(),
}
ROOMS = tuple(MAY_IMPORT)
MAY_IMPORT_VLLM = "cacheblend/vllm_backend/"

TORCH_FREE = (
    "cacheblend",
    "cacheblend.engine",
    "cacheblend.metadata",
    "cacheblend.plan",
    "cacheblend.protocols",
    "cacheblend.request",
    "cacheblend.sampling_params",
    "cacheblend.assembly",
    "cacheblend.scheduling.catalogue",
    "cacheblend.scheduling.chunk_scheduler",
    "cacheblend.scheduling.cost_model",
    "cacheblend.scheduling.delegated_scheduler",
    "cacheblend.scheduling.predictor_child",
    "cacheblend.scheduling.predictor_process",
    "cacheblend.scheduling.session_predictor",
    "cacheblend.step_log",
    "cacheblend.testing",
    "cacheblend.vllm_backend.request_format",
    "cacheblend.vllm_backend.settings",
    "kvstore",
    "kvstore.eviction",
    "kvstore.transfer",
)


def imported(source: str) -> set[str]:
    """Every module a source names in an import, wherever the import stands; relative ones start with a dot."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def broken_rules(path: Path) -> list[str]:
    """What the file imports that its room may not."""
    room = path.relative_to(ROOT).parts[0]
    may = MAY_IMPORT[room] | {room}
    tops = {name.partition(".")[0] for name in imported(path.read_text())}
    wrong = [top for top in tops if top in ROOMS and top not in may]
    if "vllm" in tops and not path.relative_to(ROOT).as_posix().startswith(MAY_IMPORT_VLLM):
        wrong.append("vllm")
    if "" in tops:
        wrong.append("a relative name")
    return [f"{path.relative_to(ROOT)} imports {name}" for name in wrong]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room):
    files = files_of(room)
    assert files
    assert [problem for path in files for problem in broken_rules(path)] == []


def test_the_import_rule_sees_imports_wherever_they_stand():
    source = """
import kvstore.key
from retrieval import index

def inside():
    from pipelines.rag import RagPipeline
    import vllm.config as config

if TYPE_CHECKING:
    from eval.scoring import f1
from . import sibling
"""
    assert imported(source) == {"kvstore.key", "retrieval", "pipelines.rag", "vllm.config", "eval.scoring", "."}


def in_a_new_process(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_engine_scheduler_predictor_and_plans_are_imported_without_torch():
    code = f"import sys, {', '.join(TORCH_FREE)}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert in_a_new_process(code) == "[]"


def test_a_question_is_scheduled_and_predicted_without_torch():
    """Not only imported: what the engine's scheduling half runs needs none either."""
    code = """
import sys
from cacheblend.plan import BlendPlan, Policy, Segment, SegmentRole
from cacheblend.protocols import Advice, QuestionQueued
from cacheblend.scheduling.chunk_scheduler import ChunkScheduler
from cacheblend.scheduling.session_predictor import SessionPredictor
from kvstore.events import Published
from kvstore.key import ChunkIdentity
from kvstore.tiers import Tier

class Nothing:
    spec = "none"
    recomputes_everything = False
    def expected_rows(self, lengths): return 0

chunk = ChunkIdentity("m", (), (1, 2, 3))
plan = BlendPlan((Segment(SegmentRole.CHUNK, (1, 2, 3), chunk), Segment(SegmentRole.QUESTION, (4,))), Nothing())
scheduler, predictor = ChunkScheduler({Tier.GPU: 50, Tier.HOST: 100}), SessionPredictor()
scheduler.on_event(Published(chunk.key, Tier.DISK, 10, 3))
predictor.observe(QuestionQueued("q", (chunk,)))
scheduler.step(predictor.advice(4))
scheduler.admit("q", plan, Policy.AUTO)
scheduler.release("q")
print("torch" in sys.modules)
"""
    assert in_a_new_process(code) == "False"


def test_every_name_the_package_offers_is_there():
    import cacheblend

    assert [name for name in cacheblend.__all__ if getattr(cacheblend, name, None) is None] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        cacheblend.no_such_name  # noqa: B018
