"""Where samples come from (`sources`), and which rank sees which (`sharding`)."""
