"""Reports: HTML pages and sheets of pictures."""
