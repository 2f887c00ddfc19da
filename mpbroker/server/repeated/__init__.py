"""Give answers again to requests that are equal to earlier ones, in C code."""
