"""What is built with the library: experiments and sweeps, diagnosis, comparisons, and the commands for them."""
