"""What a step of an engine does and takes: plain, streamed or staged, or of a group."""
