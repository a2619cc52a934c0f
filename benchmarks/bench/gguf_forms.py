"""Converts the weights of a GGUF file to Q8_0 or float32, for engines that are measured on these formats."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, quants

from cluster.models.target import key_of
from speculation.errors import ConfigurationError

# By name: the type of the matrices, and the file type in the header.
FORMS = {
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}


def brought_into(form: str, gguf: Path, folder: Path) -> Path:
    """Convert the file's weights to one of ``FORMS`` and write them to ``folder``, atomically and only once; returns the
    file.

    Every weight is first converted to float32, which is exact. As in llama.cpp's ``llama-quantize``, vectors (norms, biases)
    stay in float32 beside quantised matrices, and so do matrices whose rows are not a whole number of blocks.

    Raises:
        ConfigurationError: the file cannot be read, or the converted one cannot be written; names both.
    """
    kept = folder / f"{gguf.stem}-{key_of(gguf)}-{form}.gguf"
    if kept.is_file():
        return kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
            made = Path(building) / kept.name
            _write(GGUFReader(gguf), made, *FORMS[form])
            made.replace(kept)
    except (OSError, ValueError, IndexError, KeyError, NotImplementedError) as error:
        raise ConfigurationError(f"cannot bring {gguf} into {form} at {kept}: {error}", about=gguf) from error
    return kept


def _write(reader: GGUFReader, path: Path, wanted: GGMLQuantizationType, file_type: LlamaFileType) -> None:
    """Convert one matrix at a time, so that no whole model is in memory."""
    writer = GGUFWriter(path, reader.fields[Keys.General.ARCHITECTURE].contents())
    writer.data_alignment = reader.alignment
    _copy_fields(reader, writer)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    forms = {tensor.name: _form(tensor.shape, wanted) for tensor in reader.tensors}
    for tensor in reader.tensors:
        # GGUF lists the fastest-varying dimension first, numpy last.
        shape = [int(size) for size in reversed(tensor.shape)]
        block, size = GGML_QUANT_SIZES[forms[tensor.name]]
        count = int(tensor.n_elements)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), count // block * size, forms[tensor.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(quants.quantize(values, forms[tensor.name]))
    writer.close()


def _form(shape: np.ndarray, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    block, _ = GGML_QUANT_SIZES[wanted]
    return wanted if len(shape) > 1 and shape[0] % block == 0 else GGMLQuantizationType.F32


def _copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Copy all metadata except the fields that describe the file itself."""
    own = (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE, Keys.General.QUANTIZATION_VERSION)
    for field in reader.fields.values():
        if field.name in own or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        of = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=of)
