"""What is to be proven and measured on a GPU: `plan` has the calls, `python -m benchmarks.gpu` carries them out."""
