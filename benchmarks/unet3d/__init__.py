"""3D U-Net on KiTS19: finds kidneys and tumours in CT volumes."""
