"""Raw days of click logs to prepared files, stage by stage, in bounded memory."""
