"""The gates before a run let a sound engine pass, and end the run on one that is not."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from eval.errors import EvalError
from eval.fidelity.arms import Arm
from eval.fidelity.bench import LaidOutQuestion
from eval.fidelity.gates import RECOMPUTE_ALL, judge_gates, run_gates
from eval.fidelity.records import GateRecord, ResultLog
from eval.fidelity.reference_bench import ReferenceBench
from inputs import load_invented
from pipelines.config import make_config


class Noisy(ReferenceBench):
    """Blends a little wrongly."""

    def scores(
        self, question: LaidOutQuestion, arms: Sequence[Arm], answer: Sequence[int]
    ) -> Iterator[tuple[Arm, torch.Tensor]]:
        for arm, scored in super().scores(question, arms, answer):
            noise = torch.sin(torch.arange(scored.shape[-1])) if arm == RECOMPUTE_ALL else 0.0
            yield arm, (scored + 0.1 * noise).log_softmax(-1)


def gated(bench: ReferenceBench, path: Path) -> ResultLog:
    with ResultLog(path) as log:
        questions = [bench.lay_out(example) for example in load_invented()[:4]]
        assert len(list(run_gates(bench, questions, log))) == 3
        assert list(run_gates(bench, questions, log)) == []
        return log


def test_a_sound_engine_passes_and_its_gates_are_kept(model: Path, tmp_path: Path) -> None:
    with closing(ReferenceBench(make_config(model=str(model), cache_dir=None, max_tokens=4))) as bench:
        gated(bench, tmp_path / "records.jsonl")
    with ResultLog(tmp_path / "records.jsonl") as log:
        found = judge_gates(log, "float32")
    assert found is not None
    assert found.questions == 3
    assert found.recompute_all <= found.tolerance == pytest.approx(1e-5)
    assert found.blanked > 0.01
    assert found.answers_changed > 0


def test_an_engine_that_blends_wrongly_is_found_out(model: Path, tmp_path: Path) -> None:
    with closing(Noisy(make_config(model=str(model), cache_dir=None, max_tokens=4))) as bench:
        log = gated(bench, tmp_path / "records.jsonl")
    with pytest.raises(EvalError, match="blends wrongly here"):
        judge_gates(log, "float32")


@pytest.mark.parametrize(("blanked", "changed"), [(1e-6, True), (0.5, False)])
def test_contexts_that_do_not_reach_the_model_are_found_out(tmp_path: Path, blanked: float, changed: bool) -> None:
    with ResultLog(tmp_path / "records.jsonl") as log:
        log.append(GateRecord("q1", 0.0, 1e-9, blanked, changed))
        with pytest.raises(EvalError, match="do not reach this model"):
            judge_gates(log, "float32")


def test_the_noise_floor_of_a_run_widens_what_recomputing_every_row_may_differ_by(tmp_path: Path) -> None:
    with ResultLog(tmp_path / "records.jsonl") as log:
        assert judge_gates(log, "bfloat16") is None
        log.append(GateRecord("q1", 0.02, 0.05, 3.0, True))
        found = judge_gates(log, "bfloat16")
    assert found is not None
    assert found.tolerance == pytest.approx(0.06)
    log.gates["q2"] = GateRecord("q2", 0.02, float("nan"), 3.0, True)
    with pytest.raises(EvalError, match="blends wrongly"):
        judge_gates(log, "bfloat16")
