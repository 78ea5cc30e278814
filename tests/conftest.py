import torch

torch.set_num_threads(1)  # tests run beside one another; small networks gain nothing from more
