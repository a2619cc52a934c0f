"""Multi-token prediction (MTP) layers: those that DeepSeek V3, GLM, MiMo, ERNIE and others bring along."""
