"""Places where block bytes are. One file each; a new tier is a new file."""
