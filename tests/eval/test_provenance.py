"""What a result file says about where it comes from."""

import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
import transformers

from eval.errors import EvalError
from eval.provenance import ModelIdentity, describe_code, provenance


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    path = tmp_path / "questions.json"
    path.write_bytes(b"[]\n")
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit."""
    path = tmp_path / "checkout"
    path.mkdir()
    (path / "file.txt").write_text("one")
    identity = ["-c", "user.name=Tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        [*identity, "commit", "-q", "--no-verify", "-m", "first"],
    ):
        subprocess.run(["git", "-C", str(path), *arguments], check=True)
    return path


def account(data_file: Path, **arguments: object) -> dict:
    model = ModelIdentity("bundled:smollm2-135m", "abc123")
    return provenance(arguments, model, device="cpu", seed=7, data_file=data_file)


def test_it_states_model_device_versions_data_seed_arguments_and_time(data_file: Path) -> None:
    stated = json.loads(json.dumps(account(data_file, questions=10, ratios=(0.15, 0.3), selector=None)))
    assert stated["model"] == {"name": "bundled:smollm2-135m", "fingerprint": "abc123"}
    assert stated["device"]["kind"] == "cpu"
    assert stated["device"]["cpu"]
    assert stated["device"]["cores"] >= 1
    assert "gpu" not in stated["device"]
    assert stated["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert stated["versions"]["torch"] == torch.__version__
    assert stated["versions"]["transformers"] == transformers.__version__
    assert stated["data"] == {
        "name": "questions.json",
        "bytes": 3,
        "sha256": hashlib.sha256(b"[]\n").hexdigest(),
    }
    assert stated["seed"] == 7
    assert stated["arguments"] == {"questions": 10, "ratios": [0.15, 0.3], "selector": None}
    age = datetime.now(UTC) - datetime.fromisoformat(stated["time_utc"])
    assert 0 <= age.total_seconds() < 60


def test_no_folder_of_this_machine_is_stated(data_file: Path) -> None:
    stated = provenance(
        {
            "data": data_file,
            "out": str(data_file.parent / "out"),
            "more": {"models": [data_file.parent / "m"]},
        },
        ModelIdentity(str(data_file.parent / "my-model"), "f"),
        device="cpu",
        seed=0,
        data_file=data_file,
    )
    assert str(data_file.parent) not in json.dumps(stated)
    assert stated["model"]["name"] == "my-model"
    assert stated["arguments"] == {"data": "questions.json", "out": "out", "more": {"models": ["m"]}}


def test_a_clean_checkout_states_its_commit_and_a_changed_one_that_it_is_dirty(checkout: Path) -> None:
    commit = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True).strip()
    assert describe_code(checkout) == {"commit": commit, "dirty": False}
    (checkout / "file.txt").write_text("two")
    assert describe_code(checkout) == {"commit": commit, "dirty": True}
    (checkout / "file.txt").write_text("one")
    (checkout / "new.py").write_text("")
    assert describe_code(checkout) == {"commit": commit, "dirty": True}


def test_an_installed_package_does_not_take_the_commit_of_a_checkout_around_it(checkout: Path) -> None:
    (checkout / "site-packages").mkdir()
    assert describe_code(checkout / "site-packages") == {"commit": None, "dirty": None}


def test_a_data_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"gone\.json cannot be read"):
        account(tmp_path / "gone.json")


def test_provenance_of_a_cpu_run_loads_no_torch(data_file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from eval.provenance import ModelIdentity, provenance; "
        f"provenance({{}}, ModelIdentity('m', 'f'), 'cpu', 0, Path({str(data_file)!r})); "
        "print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.check_output([sys.executable, "-c", script], text=True, cwd=root).strip() == "False"
