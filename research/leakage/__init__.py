"""What an honest-but-curious coordinator learns about the clients' data: label histograms and images.

The clients hold images of digits. The coordinator has labelled images of its own (the shadow set), knows model,
algorithm and hyperparameters, and reads what one view shows it: a plaintext update, a sketch in the clear, a Gram
matrix, the opened values of a private round, or an update with differential privacy.

| module | holds |
|---|---|
| `specification` | the run specification of an attack |
| `accounting` | epsilon of DP-SGD, by `dp_accounting` |
| `federation` | data, local training, models, shadow clients |
| `views` | what the coordinator sees |
| `labels`, `images` | the mathematics of guesses and of reconstructions |
| `attack`, `label_inference`, `gradient_inversion` | what is guessed from each view, and how well |
| `laboratory` | one run: its measures |
"""
