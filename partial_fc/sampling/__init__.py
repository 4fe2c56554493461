"""Which class centres are active in a step."""
