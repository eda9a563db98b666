"""RNN-T: speech recognition on LibriSpeech with a recurrent transducer."""
