"""Task files that travel: from a folder, a web address or the Hugging Face Hub into a store, and out to the Hub."""
