"""Verification sets in all their files: .bin, .safetensors, lists of pairs, folders, and pairs drawn from a set."""
