"""The keeper of a rank's descriptors: standard library and msgspec only, no CUDA, no child."""
