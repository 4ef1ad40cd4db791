"""Typed configuration of a run. `schema` declares it, `load` reads TOML and refuses what cannot work."""
