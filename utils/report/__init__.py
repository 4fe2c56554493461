"""Reports for people: HTML pages and sheets of pictures."""
