"""Limits on one request and one draft. The protos state the same numbers."""

# Ranges of numbers, both ends allowed; of TOP_P the lower one is not.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 100.0
TOP_K, TOP_P, MIN_P = (0, (1 << 32) - 1), (0.0, 1.0), (0.0, 1.0)
REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY, LOGIT_BIAS = (0.01, 10.0), (-2.0, 2.0), (-2.0, 2.0), (-100.0, 100.0)
MAX_TOKENS = (1 << 31) - 1
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 16, 256, 64
MAX_BAD_WORDS, MAX_SPELLINGS = 256, 512
MAX_LOGIT_BIAS, MAX_LOGPROBS = 1024, 20
MAX_GRAMMAR_CHARACTERS, MAX_MESSAGES = 65_536, 1024
MAX_TREE_NODES = 512
# Drafts that share a message. A verifier has at most half as many sessions told at once; more would only keep it busy.
MAX_DRAFTS = 8192
MAX_SOURCES, MAX_SOURCE_NAME = 16, 64
# Strategies that one answer is compared with; characters of the name that requests have in common.
MAX_COMPARED, MAX_GROUP_CHARACTERS = 8, 64
# Most sources that a request may list.
MAX_LISTED_SOURCES = 16
MAX_PROPOSAL, MAX_ASSUMED = 256, 512
MAX_TOP_IDS, MAX_LAYERS = 64, 16
# Models that a drafter may tell of, and of each: tenants, characters of a tenant's name, and of its conditions.
MAX_HELD_MODELS, MAX_HELD_TENANTS, MAX_TENANT_CHARACTERS, MAX_WHEN_CHARACTERS = 64, 64, 512, 65_536
# Of each of a drafter's words for its target, its tokenizer and its version.
MAX_CARD_CHARACTERS = 4096
MAX_SESSION_TOKENS, MAX_UINT64 = 1 << 20, (1 << 64) - 1

MAX_PUBLIC_MESSAGE_BYTES = MAX_DRAFT_MESSAGE_BYTES = 4 << 20
MAX_VERIFY_MESSAGE_BYTES = 16 << 20

MAX_FEATURE_WIDTH = 262_144
# Bytes of hidden states in one message: enough for one row of the greatest width in float32, with room for a step report.
MAX_FEATURE_BYTES = 1 << 20

# Deadlines in seconds: for a verifier to describe itself, and for all components to forget a tenant.
DESCRIBE_S, FORGET_S = 5.0, 10.0
# Seconds for which an adapter that is to be unloaded may still be in use, and for all verifiers to read one.
UNLOAD_S, ADAPT_S = 60.0, 120.0
# Seconds that answers under way may get to end when weights are replaced, and get where nobody says.
RELOAD_WITHIN_S, RELOAD_S = (1.0, 3600.0), 600.0

MAX_QUERIES, MAX_SUFFIX, MAX_CONTINUATIONS, MAX_CONTINUATION = 256, 64, 512, 64
# Tokens of an answer that is kept for later drafts, and of all answers in one message.
MAX_KEPT_ANSWER, MAX_RECALLED = 65_536, 262_144
