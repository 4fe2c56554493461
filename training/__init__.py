"""The parts of train.py: what a run is set up with, what it trains, and one optimizer step."""
