"""docs/reference/wire_format.md in NumPy: shares nothing with the library's implementation."""

from .codecs import CODECS, Codec, Context, find_codec
from .engine import ReferenceEngine
from .layout import (
    CHUNK_BYTES,
    TILE_ELEMENTS,
    Layout,
    Parameter,
    Tile,
    assign_owners,
    cut_chunks,
    sent_per_step,
    two_level_bytes_per_step,
    wire_bytes_per_step,
)
from .message import (
    HEADER,
    MAGIC,
    Header,
    accumulate_tensors,
    decode_tensor,
    encode_tensor,
    message_checksum,
    word_sum,
)
from .reduce_scatter import (
    ReferenceReduceScatter,
    gathered_bytes_per_step,
    scattered_bytes_per_step,
)
from .scalars import DTYPES, narrow, widen

__all__ = [
    "CHUNK_BYTES",
    "CODECS",
    "DTYPES",
    "HEADER",
    "MAGIC",
    "TILE_ELEMENTS",
    "Codec",
    "Context",
    "Header",
    "Layout",
    "Parameter",
    "ReferenceEngine",
    "ReferenceReduceScatter",
    "Tile",
    "accumulate_tensors",
    "assign_owners",
    "cut_chunks",
    "decode_tensor",
    "encode_tensor",
    "find_codec",
    "gathered_bytes_per_step",
    "message_checksum",
    "narrow",
    "scattered_bytes_per_step",
    "sent_per_step",
    "two_level_bytes_per_step",
    "widen",
    "wire_bytes_per_step",
    "word_sum",
]
