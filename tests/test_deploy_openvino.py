"""Networks exported for OpenVINO: its own runtime computes the embeddings of torch, and its files say what they take."""

import sys
from pathlib import Path

import numpy as np
import pytest
import test_scripts_deploy_export as exports

from eval.foreign_networks import contract_of_texts
from scripts.deploy.export import main as export

pytestmark = pytest.mark.numeric
toy = exports.toy
WHERE = "pip install openvino -c requirements-optional.txt"


@pytest.mark.parametrize("more", [[], ["--with-preprocess", "--flip"]])
def test_openvino_computes_the_embeddings_of_torch(toy: list[str], tmp_path: Path, more: list[str]):
    openvino, out = pytest.importorskip("openvino", reason=WHERE), tmp_path / "out" / "net.xml"
    assert export([*toy, "--out", str(out), *more]) == 0
    assert exports._left(out.parent) == ["net.bin", "net.xml"]
    for word in (str(exports.ROOT), str(tmp_path), "site-packages"):
        assert not any(word.encode() in path.read_bytes() for path in out.parent.iterdir())
    model = openvino.Core().read_model(out)
    contract = contract_of_texts(model.get_rt_info(["framework"]).value)
    assert contract is not None and contract.embedding_size == exports.DIM and contract.takes_bytes == bool(more)
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for batch in (1, 5):
        pixels = exports._pixels(batch)
        given = pixels if more else ((pixels.astype(np.float32) - 127.5) / 127.5).transpose(0, 3, 1, 2)
        found = list(compiled([np.ascontiguousarray(given)]).values())
        embeddings, expected = found[0], exports._by_torch(exports._model(toy), pixels, bool(more))
        assert exports._distance(embeddings * found[1][:, None] if more else embeddings, expected) < 1e-4


def test_a_file_that_differs_or_cannot_be_made_does_not_appear(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = [*toy, "--to", "openvino", "--out", str(tmp_path / "out" / "net.xml")]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "openvino", None)
        assert export(words) == 1
    advice = f"--to openvino needs openvino: {sys.executable} -m pip install onnx onnxruntime onnxscript openvino"
    assert advice in exports.one_line(capsys, *exports.PROGRESS)
    pytest.importorskip("openvino", reason=WHERE)
    monkeypatch.setattr(exports.Toy, "wrong", 1.2e-4)
    assert export(words) == 1
    assert "differs from torch by 0.00012 of the length of an embedding" in exports.one_line(capsys, *exports.PROGRESS)
    assert exports._left(tmp_path / "out") == []
