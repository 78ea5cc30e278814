"""A fine-tuned copy of a backbone as a task of about one bit per weight."""
