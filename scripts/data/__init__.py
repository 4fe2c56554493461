"""Making, checking and changing sets."""
