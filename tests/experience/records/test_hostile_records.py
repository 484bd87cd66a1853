"""What is no record, whatever its digests say, is refused at once and by the name of the file."""

import contextlib
import json
import os
import socket

import pytest
from safetensors.numpy import load_file, save_file

from rlctl.experience.records.errors import RecordError
from rlctl.experience.records.manifest import (
    BATCH,
    MANIFEST,
    SUMS,
    step_folder,
)
from rlctl.experience.records.reading import read_bundle

from .written import resummed, written

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop of links", "socket"])
@pytest.mark.parametrize("name", [MANIFEST, BATCH, SUMS])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, name, kind):
    written(tmp_path)
    file = step_folder(tmp_path / "records", 3) / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(file.parent):
            listening.bind(name)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file)
    with pytest.raises(RecordError) as caught:
        read_bundle(tmp_path, 3)
    assert caught.value.file == file
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000])
def test_json_of_any_depth_is_refused(tmp_path, text):
    written(tmp_path)
    place = step_folder(tmp_path / "records", 3)
    (place / MANIFEST).write_text(text)
    resummed(place)
    with pytest.raises(RecordError) as caught:
        read_bundle(tmp_path, 3)
    assert caught.value.file == place / MANIFEST


def test_a_negative_token_is_refused(tmp_path):
    written(tmp_path)
    place = step_folder(tmp_path / "records", 3)
    columns = load_file(place / BATCH)
    columns["response_ids"][1] = -7
    save_file(columns, place / BATCH)
    resummed(place)
    with pytest.raises(RecordError, match="-7 is no token"):
        read_bundle(tmp_path, 3)


@pytest.mark.parametrize("row", [-1, 6, 10**9])
def test_micro_batches_of_rows_that_are_not_there_are_refused(tmp_path, row):
    written(tmp_path)
    place = step_folder(tmp_path / "records", 3)
    manifest = json.loads((place / MANIFEST).read_bytes())
    manifest["rounds"][0]["micro_batches"][0][0][0][0] = row
    (place / MANIFEST).write_text(json.dumps(manifest))
    resummed(place)
    with pytest.raises(RecordError, match="micro-batches name rows beyond its 6"):
        read_bundle(tmp_path, 3)
