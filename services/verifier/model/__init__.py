"""The target model: its port, its layers in this process, hidden states, captured passes."""
