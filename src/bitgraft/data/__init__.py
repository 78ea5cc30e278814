"""Labelled images: where they come from, how they are split, and how one becomes a tensor."""
