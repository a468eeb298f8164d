"""Epochs as files of other programs, and back: safetensors, Hugging Face, flax, PyTorch, a plain step of Orbax.

Promises: every byte is verified on the way, nothing is larger in memory than what the caller allows, and what is
written appears whole or not at all.
"""
