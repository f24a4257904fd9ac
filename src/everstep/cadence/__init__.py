"""When the next snapshot or checkpoint is taken. Pure: imports core alone."""
