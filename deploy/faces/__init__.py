"""Face detectors, aligned crops, five-point landmarks, and the listing of pictures."""
