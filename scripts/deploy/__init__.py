"""From weights to use: exports, embeds, keeps galleries of people, and describes networks."""
