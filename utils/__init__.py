"""What every package may use: image, randomness, distributed, schedule, optim, checkpoint, log, program, cli. A closed list."""
