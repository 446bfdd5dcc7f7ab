"""A GGUF file of a Llama that converts, loads and runs in a moment."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, FEED_FORWARD, VOCABULARY = 48, 3, 56, 40


def write_gguf(path: Path, layers: int = 1) -> Path:
    """Random weights, one KV head, a byte-level tokenizer of the characters from ! to E."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(ord("!") + i) for i in range(VOCABULARY - 3)]
    writer.add_token_list(["<s>", "</s>", *letters, "!!"])
    writer.add_token_types([3, 3] + [1] * (VOCABULARY - 2))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    kv = HIDDEN // HEADS
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (kv, HIDDEN),
                "attn_v": (kv, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_gate": (FEED_FORWARD, HIDDEN),
                "ffn_up": (FEED_FORWARD, HIDDEN),
                "ffn_down": (HIDDEN, FEED_FORWARD),
                "attn_norm": (HIDDEN,),
                "ffn_norm": (HIDDEN,),
            }.items()
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
