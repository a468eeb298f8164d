"""The formats of other programs that `import_` reads, and `export` writes."""

IMPORTED = ("msgpack", "safetensors", "dcp")
EXPORTED = ("orbax", "safetensors", "huggingface")
