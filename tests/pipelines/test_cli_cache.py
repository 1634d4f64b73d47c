"""`cacheblend cache ls | verify | prune` over real chunk files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

DOCUMENTS = ["inputs/data/demo/salt-cake.md", "inputs/data/demo/velmory-ferry.md"]


@pytest.fixture
def folder(cli: Any, tiny_options: list[str]) -> Path:
    """A cache of two chunks behind the system prompt, and one of them behind nothing."""
    assert cli("precompute-chunk-cache", *DOCUMENTS, *tiny_options).exit_code == 0
    assert cli("precompute-chunk-cache", DOCUMENTS[0], "--prefix", "none", *tiny_options).exit_code == 0
    return Path(tiny_options[-1])


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!q]*/*.safetensors"))


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def run_json(cli: Any, *args: object, exit_code: int = 0) -> dict[str, Any]:
    result = cli("cacheblend", "cache", *args, "--json")
    assert result.exit_code == exit_code, result.stderr
    return json.loads(result.stdout)


def test_ls_counts_chunks_by_model_and_prefix(cli: Any, folder: Path) -> None:
    listing = run_json(cli, "ls", "--cache-dir", folder)
    groups = {bool(group["prefix_tokens"]): group for group in listing["groups"]}
    assert {has_prefix: group["chunks"] for has_prefix, group in groups.items()} == {True: 2, False: 1}
    assert listing["chunks"] == 3
    assert listing["tokens"] == sum(group["tokens"] for group in listing["groups"])
    assert listing["bytes"] == sum(file.stat().st_size for file in files_of(folder))
    assert len({group["fingerprint"] for group in listing["groups"]}) == 1


def test_ls_prints_short_names_and_totals_and_each_chunk_on_request(cli: Any, folder: Path) -> None:
    listing = run_json(cli, "ls", "--cache-dir", folder, "--chunks")
    plain = cli("cacheblend", "cache", "ls", "--cache-dir", folder).stdout
    assert listing["groups"][0]["fingerprint"][:12] in plain
    assert f"{listing['tokens']:,}" in plain
    assert listing["each"][0]["key"][:12] not in plain
    each = cli("cacheblend", "cache", "ls", "--cache-dir", folder, "--chunks").stdout
    for chunk in listing["each"]:
        assert chunk["key"][:12] in each


def test_verify_finds_nothing_wrong_with_a_sound_cache(cli: Any, folder: Path) -> None:
    result = cli("cacheblend", "cache", "verify", "--cache-dir", folder)
    assert (result.exit_code, result.stdout) == (0, "3 files verified, nothing wrong.\n")
    assert "3/3" in result.stderr


def test_verify_reports_a_flipped_byte_and_ends_with_1_and_changes_nothing(cli: Any, folder: Path) -> None:
    damaged = files_of(folder)[0]
    flip_a_byte(damaged)
    for _ in range(2):
        report = run_json(cli, "verify", "--cache-dir", folder, exit_code=1)
        assert [(p["path"], p["reason"]) for p in report["problems"]] == [(str(damaged), "checksum")]
        assert report["files"] == 3


def test_verify_fix_sets_the_damaged_file_aside_and_the_chunk_is_computed_anew(
    cli: Any, folder: Path, tiny_options: list[str]
) -> None:
    flip_a_byte(files_of(folder)[0])
    fixed = cli("cacheblend", "cache", "verify", "--cache-dir", folder, "--fix")
    assert fixed.exit_code == 1
    assert "1 not served (1 checksum): 1 set aside" in fixed.stdout
    assert run_json(cli, "verify", "--cache-dir", folder)["files"] == 2
    listing = run_json(cli, "ls", "--cache-dir", folder)
    assert (listing["chunks"], listing["quarantined_bytes"] > 0) == (2, True)
    again = [
        json.loads(cli("precompute-chunk-cache", *args, *tiny_options, "--json").stdout)["computed"]
        for args in (DOCUMENTS, [DOCUMENTS[0], "--prefix", "none"])
    ]
    assert sum(again) == 1


def test_verify_fix_leaves_alone_what_is_not_damaged_and_says_so(cli: Any, folder: Path) -> None:
    """A file of another format version is right for a program of that version."""
    newer, damaged, _ = files_of(folder)
    newer.write_bytes(newer.read_bytes().replace(b'"version":"2"', b'"version":"9"', 1))
    flip_a_byte(damaged)
    told = run_json(cli, "verify", "--cache-dir", folder, exit_code=1)["problems"]
    assert {problem["path"]: problem["left_alone"] for problem in told} == {str(newer): True, str(damaged): False}
    fixed = cli("cacheblend", "cache", "verify", "--cache-dir", folder, "--fix")
    assert fixed.exit_code == 1
    (left_alone,) = [line for line in fixed.stdout.splitlines() if line.endswith("(left alone)")]
    assert left_alone.startswith(f"{newer}: format_version: ")
    assert fixed.stdout.endswith(": 1 set aside, 1 left alone.\n")
    assert newer.exists()
    assert not damaged.exists()


def test_prune_says_what_counts_as_use(cli: Any) -> None:
    help_text = " ".join(cli("cacheblend", "cache", "prune", "--help").stdout.split())
    assert "A chunk is used when it is written or read from disk" in help_text


def test_a_file_without_a_sound_header_is_counted_by_ls(cli: Any, folder: Path) -> None:
    files_of(folder)[0].write_bytes(b"nothing of the kind")
    listing = run_json(cli, "ls", "--cache-dir", folder)
    assert (listing["chunks"], listing["unreadable"]) == (2, 1)
    assert "cache verify" in cli("cacheblend", "cache", "ls", "--cache-dir", folder).stdout


def test_prune_removes_the_least_recently_used_until_the_rest_fits(cli: Any, folder: Path) -> None:
    files = files_of(folder)
    for age, file in enumerate(files):
        os.utime(file, (time.time() - age * 100,) * 2)
    keep = files[0].stat().st_size
    report = run_json(cli, "prune", "--cache-dir", folder, "--max-bytes", keep)
    assert files_of(folder) == files[:1]
    assert len(report["removed"]) == 2
    assert report["left_bytes"] == keep


def test_prune_by_age_keeps_what_was_used_since(cli: Any, folder: Path) -> None:
    old, *recent = files_of(folder)
    os.utime(old, (time.time() - 3 * 86400,) * 2)
    result = cli("cacheblend", "cache", "prune", "--cache-dir", folder, "--older-than", "2d")
    assert result.exit_code == 0, result.stderr
    assert f"removed {old.name[:12]}" in result.stdout
    assert "1 chunks removed" in result.stdout
    assert files_of(folder) == recent


def test_prune_without_limits_only_empties_the_quarantine(cli: Any, folder: Path) -> None:
    flip_a_byte(files_of(folder)[0])
    cli("cacheblend", "cache", "verify", "--cache-dir", folder, "--fix")
    report = run_json(cli, "prune", "--cache-dir", folder)
    assert report["removed"] == []
    assert report["freed_bytes"] > 0
    assert run_json(cli, "ls", "--cache-dir", folder)["quarantined_bytes"] == 0
    assert len(files_of(folder)) == 2


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_a_folder_that_is_not_there_is_one_sentence_and_not_created(cli: Any, tmp_path: Path, command: str) -> None:
    result = cli("cacheblend", "cache", command, "--cache-dir", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: There is no cache folder {tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()
