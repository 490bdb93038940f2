"""How the processes of a trainer are started, asked and ended, whatever they compute."""
