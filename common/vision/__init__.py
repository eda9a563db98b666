"""Pictures: one reader for all workloads of images, in a DALI and a torchvision form."""
