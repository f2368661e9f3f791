"""Tools built on the library: experiments and sweeps, diagnosis, comparisons, and their commands."""
