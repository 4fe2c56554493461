"""Readers of verification sets: .bin, .safetensors, lists of pairs, folders, and pairs drawn from a set."""
