"""Networks in the formats of other programs, checked against the original."""
