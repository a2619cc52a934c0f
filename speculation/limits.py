"""Limits on one request and one draft. The protos state the same numbers."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_MESSAGES = 1024
MAX_TREE_NODES = 512
MAX_SOURCES = 16
MAX_SOURCE_NAME = 64
MAX_PROPOSAL = 256
MAX_ASSUMED = 512
MAX_TOP_IDS = 64
MAX_LAYERS = 16
MAX_SESSION_TOKENS = 1 << 20
MAX_UINT64 = (1 << 64) - 1

MAX_PUBLIC_MESSAGE_BYTES = 4 << 20
MAX_DRAFT_MESSAGE_BYTES = 4 << 20
MAX_VERIFY_MESSAGE_BYTES = 16 << 20

MAX_FEATURE_WIDTH = 262_144
# Bytes of hidden states in one message: enough for one row of the greatest width in float32, with room for a step report.
MAX_FEATURE_BYTES = 1 << 20

# Deadlines in seconds: for a verifier to describe itself, and for all components to forget a tenant.
DESCRIBE_S = 5.0
FORGET_S = 10.0

MAX_QUERIES = 256
MAX_SUFFIX = 64
MAX_CONTINUATIONS = 512
MAX_CONTINUATION = 64
