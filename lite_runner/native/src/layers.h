// Packed layers, and the inputs of a step. A packed layer is one block of bytes: a struct with the
// offsets of its parts from its own start (0: absent), then the parts. lite_runner/native/packing.py
// writes them, and the user's cache keeps them: a change of a struct needs another FORMAT in
// lite_runner/backends/native/packed_cache.py.
#pragma once
#include <cstdint>

namespace lite_runner {

constexpr int64_t kPanel = 32;       // outputs of a matrix that lie side by side
constexpr int64_t kInputGroup = 32;  // inputs that are rounded to 8 bits with one scale
constexpr int64_t kChunk = 128;      // keys whose scores are summed up before they are merged

enum class Format : int64_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kInt8 = 2,
  kInt4 = 3,
  kFloat16 = 4,
  kFloat8 = 5,  // e4m3: four bits of exponent, three of fraction
  kTable4 = 6,  // indices of 4 bits into a table of floats, two inputs of an output in a byte
  kJoined = 7,  // a JoinedMatrix
  kQ4_0 = 8,    // from here on GGUF's blocks: see BlockForm
  kQ4_1 = 9,
  kQ5_0 = 10,
  kQ5_1 = 11,
  kQ8_0 = 12,
  kQ4_K = 13,
  kQ5_K = 14,
  kQ6_K = 15,
  kIQ4_NL = 16,
  kIQ4_XS = 17,
  kQ2_K = 18,
  kQ3_K = 19
};

// The values of a type of GGUF's blocks are (d * scale) * (q - offset) + minimum, with a
// float16 d for `span` inputs of an output and an integer scale, of 8 bits at most, for `sub` of
// them. The minimum is a float16, or where there are scales the integer -minimum times a second
// float16. With a table q is an index into kTable.
//
// A panel consists of units of `span` inputs: d [32], the second float16 [32], scales [span / sub]
// [32], minimums alike (of Q2_K in the upper nibbles of the scales), then for each 32 inputs words of
// 32 bits [words][32]. Quads of inputs lie in the bytes of words in the order of kBytePairs: of 8
// bits each in a word of its own, else one quad in the lower nibbles and the next in the upper; of 2
// and 3 bits four quads, 2 bits each. What q has above these bits comes behind them: 1 bit of eight
// quads in one word, that of quad j is bit j of the bytes; 2 bits of four quads in each of two words,
// bits 2 j.
struct BlockForm {
  int64_t bits, span, sub;
  bool scales, minimums;
  int64_t offset;
  bool table;

  constexpr int64_t low_bits() const { return bits < 4 ? 2 : 4; }  // of q, that come first
  constexpr int64_t high_bits() const { return bits == 8 ? 0 : bits - low_bits(); }
  constexpr bool nibbles() const { return bits == 2; }  // a scale and a minimum share a byte
  constexpr int64_t scales_bytes() const { return scales ? span / sub * kPanel : 0; }
  constexpr int64_t scales_at() const { return (minimums ? 4 : 2) * kPanel; }
  constexpr int64_t minimums_at() const { return scales_at() + (nibbles() ? 0 : scales_bytes()); }
  constexpr int64_t words_at() const { return minimums_at() + (minimums ? scales_bytes() : 0); }
  constexpr int64_t words_bytes() const { return bits * 4 * kPanel; }  // of 32 inputs
  constexpr int64_t bytes() const { return words_at() + span / 32 * words_bytes(); }
};

constexpr BlockForm kBlockForms[] = {
    {4, 32, 32, false, false, 8, false},   // Q4_0
    {4, 32, 32, false, true, 0, false},    // Q4_1
    {5, 32, 32, false, false, 16, false},  // Q5_0
    {5, 32, 32, false, true, 0, false},    // Q5_1
    {8, 32, 32, false, false, 0, false},   // Q8_0
    {4, 256, 32, true, true, 0, false},    // Q4_K
    {5, 256, 32, true, true, 0, false},    // Q5_K
    {6, 256, 16, true, false, 32, false},  // Q6_K
    {4, 32, 32, false, false, 0, true},    // IQ4_NL
    {4, 256, 32, true, false, 0, true},    // IQ4_XS
    {2, 256, 16, true, true, 0, false},    // Q2_K
    {3, 256, 16, true, false, 4, false},   // Q3_K
};
constexpr int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};

constexpr const BlockForm& form_of(Format format) {
  return kBlockForms[static_cast<int64_t>(format) - static_cast<int64_t>(Format::kQ4_0)];
}
template <Format format>
constexpr BlockForm kForm = form_of(format);
// Ones in the lowest `bits` bits of each byte.
template <int64_t bits>
constexpr uint32_t kOfBytes = 0x01010101u * ((1u << bits) - 1);

// Of the scales of groups; those of whole rows are float32.
enum class ScaleType : int64_t { kHalf = 0, kFloat32 = 1, kBFloat16 = 2 };

enum class CacheType : int64_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2 };

// The order of inputs k in a word, from its lowest bits on: as they are (int8 by int8); or
// 0 2 1 3, and 0 2 4 6 1 3 5 7, so that a shift leaves two neighbours in its halves.
enum class Order : int64_t { kPlain = 0, kBytePairs = 1, kNibblePairs = 2 };

// A matrix [out, in] in panels of 32 outputs: for each panel, for each input, 32 values. Of int8
// four inputs, of int4 eight inputs of an output make one 32-bit word: see Order.
struct Matrix {
  Format format;
  int64_t out, in;
  int64_t group;          // inputs that share a scale; 0: all
  // The inputs of integers are rounded too: 1: to 8 bits, but near outliers, 0: to 16. Those of
  // bfloat16 are rounded to it if 1; attention before such a projection is too: multiplies_pairs.
  int64_t rounded_input;
  int64_t data, scales, minimums;  // scales float32 [panels * 32], or [panels, in / group, 32]
  int64_t sums;                    // int32 [panels, input groups, 32] of each output's integers
  int64_t bias;                    // float32 [panels * 32]
  ScaleType scale_type;
  // Of layouts of other tools. The integer that stands for 0: `zero`, or int8 [panels, in / group, 32];
  // and int32 [in]: the input that each column is of, 0: the columns are in the order of the inputs.
  int64_t zero, zeros, order;
  int64_t table;  // [16], what indices stand for: float32, or int8 of kInt4 (0: no indices)

  const uint8_t* at(int64_t offset) const {
    return reinterpret_cast<const uint8_t*>(this) + offset;
  }
  const uint16_t* halves(int64_t offset) const {
    return reinterpret_cast<const uint16_t*>(at(offset));
  }
  const int8_t* integer_table() const { return reinterpret_cast<const int8_t*>(at(table)); }
  bool integers() const { return format == Format::kInt8 || format == Format::kInt4 || blocks(); }
  bool blocks() const { return format >= Format::kJoined; }  // their inputs are rounded alike
  int64_t panels() const { return (out + kPanel - 1) / kPanel; }
  int64_t depth() const { return (in + 7) / 8 * 8; }  // inputs as stored, zeros behind them
  int64_t groups() const { return group ? in / group : 1; }
  // Inputs that are rounded with one scale: finer than a row, whose largest number would blur the
  // others.
  int64_t input_group() const {
    if (blocks()) return 32;
    return group ? group : rounded_input ? kInputGroup : 4 * kInputGroup;
  }
  int64_t input_groups() const { return (depth() + input_group() - 1) / input_group(); }
  inline int64_t panel_bytes() const;
};

// Matrices with the same inputs as one: its panels are those of the parts one after the other, or by
// turns. Parts are floats or blocks; the bias is that of the whole.
struct JoinedMatrix {
  Matrix plain;
  int64_t count, by_turns;
  int64_t parts[3];  // Matrices, offsets from this struct

  const Matrix& part(int64_t index) const {
    return *reinterpret_cast<const Matrix*>(plain.at(parts[index]));
  }
};

inline int64_t Matrix::panel_bytes() const {
  if (format == Format::kJoined)  // about
    return reinterpret_cast<const JoinedMatrix*>(this)->part(0).panel_bytes();
  if (blocks()) return in / form_of(format).span * form_of(format).bytes();
  constexpr int64_t bits[] = {32, 16, 8, 4, 16, 8, 4};
  return depth() * kPanel * bits[static_cast<int64_t>(format)] / 8;
}

struct Norm {
  int64_t centred;  // 1: LayerNorm, 0: RMSNorm
  double epsilon;
  int64_t gamma, beta;  // float32, offsets from the layer
};

// Offsets of A [rank, in] and B [out / 32, rank, 32] of each matrix in an adapter slot, in numbers;
// -1: none. The matrices stand in the layer's order: query, key, value, projection, or gate,
// up, down, or the only one.
struct LoraPair {
  int64_t rank;  // 0: no adapter changes this layer
  int64_t down[4], up[4];
};

// LoRA adapters of the tokens of a step.
struct Adapters {
  const int32_t* place;  // of each token, below 0: the base model; nullptr: the layer has none
  const void* pool;      // [places, stride] float32, or the upper halves of such
  int64_t stride;
  bool bfloat16;
};

struct Layer {
  template <class T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(this) + offset);
  }
  const Matrix& matrix(int64_t offset) const { return *at<Matrix>(offset); }
};

struct EmbeddingLayer : Layer {
  int64_t hidden;
  int64_t table;      // Matrix [vocab, hidden]
  int64_t positions;  // Matrix [length, hidden] that is added
  // Numbers of a token for each of the layers: side_table, a Matrix [vocab, layers * side], times
  // table_scale, and the normed outputs of side_inward, a Matrix [layers * side, hidden]; their sum
  // is times side_scale. 0: none.
  int64_t side, side_layers, side_table, side_inward;
  double table_scale, side_scale;
  Norm norm;          // gamma 0: none
  Norm side_norm;     // of each layer's numbers
  LoraPair adapters;  // A is [vocab, rank]
};

// kNone: a layer of a model whose blocks have no attention, or no feed-forward network.
enum class Kind : int64_t {
  kAttention = 1,
  kFeedForward = 2,
  kExperts = 3,
  kRecurrent = 4,
  kNone = 5,
  kJoin = 6
};

// How the output of a layer is added to its input.
struct Residual {
  Norm norm;     // of the output; gamma 0: none
  double scale;  // of the normed output
  double normed_input;  // what is added to is that times the normed input; 0: the input itself
  Norm sum_norm;        // of the sum; gamma 0: none

  bool plain() const {
    return !norm.gamma && scale == 1.0 && normed_input == 0.0 && !sum_norm.gamma;
  }
};

struct AttentionLayer : Layer {
  Kind kind;
  int64_t hidden, heads, kv_heads, head_dim;
  int64_t rotary, rope_width, rope_offset;  // of a row of the rotary table, where this layer's begins
  int64_t slopes;           // float32 [heads] of ALiBi
  int64_t window;           // keys that a token sees, its own the last of them; 0: all
  int64_t chunk;            // a token sees keys of its own chunk of so many alone; 0: all
  // float32 [n] that queries are times behind 0, 1, .. whole spans of positions, the last one for all
  // behind; 0: none.
  int64_t temperatures, span;
  int64_t prefix;           // 1: the step says which key is the last that each token sees
  int64_t parallel;         // 1: its input is kept for the feed-forward layer behind it
  int64_t joint_norm;       // 1: query_norm and key_norm are over all heads together
  int64_t apart_norm;       // 1: they have weights of each head
  int64_t late_norm;        // 1: they are of rotated heads
  int64_t sinks;            // float32 [heads]: a further score, which adds no value
  int64_t placed_queries;   // float32 [positions, heads * head_dim]: queries by position; 0: of x
  int64_t gated;            // 1: behind the queries gates of the heads' outputs, by their sigmoid
  int64_t borrowed;         // 1: it has queries alone, and the cache is that of a layer before
  // Of latent attention: the rank of what is kept, numbers of a head's query and value, and the rank
  // of queries; 0: none. Of query_key_value the outputs are then queries, or their latent vectors,
  // and what is kept with the rotated part.
  int64_t latent, latent_width, latent_value, query_rank;
  int64_t places;  // int32 [head_dim] of these in a key
  int64_t absorb;  // float32 [heads, latent_width, head_dim]
  int64_t expand;  // float32 [heads, head_dim, latent_value]
  int64_t query;   // Matrix [heads * latent_width, query_rank]
  Norm latent_norm, latent_query_norm;
  double scale;             // of scores
  double softcap;           // that tanh keeps scores within; 0: none
  double clip;              // of queries, keys and values behind their norms; 0: none
  int64_t query_key_value;  // Matrix [(heads (+ heads, the gates) + 2 kv_heads) * head_dim, hidden]
  int64_t projection;       // Matrix [hidden, heads * head_dim]
  Norm norm;                // of the input; gamma 0: none, here and below
  Norm query_norm, key_norm;  // of each head, before it is rotated
  Norm value_norm;            // of each head
  Residual residual;
  LoraPair adapters;
};

// A mixer with a state [heads, key_dim, value_dim] a sequence in place of keys. Of each token the state
// decays, and gets a key times what is written of a value; queries read it.
struct RecurrentLayer : Layer {
  Kind kind;
  int64_t hidden;
  int64_t heads, key_heads;  // of values, and of keys and queries, which divide these
  int64_t key_dim, value_dim;
  int64_t kernel;      // tokens that queries, keys and values are convolved over
  int64_t delta;       // 1: gated delta net: what is written is less what the state has; 0: Mamba-2
  int64_t groups;      // of the outputs, that are normed by themselves
  int64_t inward;      // Matrix [channels + heads * value_dim, hidden]: queries, keys, values; gates
  int64_t rates;       // Matrix [heads, hidden], of a delta net two
  int64_t projection;  // Matrix [hidden, heads * value_dim]
  int64_t taps, taps_bias;          // float32 [kernel, channels] and [channels]; 0: none
  int64_t decay, rate_bias, skip;   // float32 [heads]; skip: of a value in the output, 0: none
  Norm norm, out_norm;
  Residual residual;
  LoraPair adapters;  // what is convolved, gates, projection

  int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
  int64_t panels() const { return (value_dim + kPanel - 1) / kPanel; }
  // A slot's state: the last inputs of the convolution [kernel - 1, channels], then
  // [heads, panels, key_dim, 32].
  int64_t window_floats() const { return (kernel - 1) * channels(); }
};

// The input of a multi-token prediction layer: of the token's embedding and of a hidden state,
// each behind its norm.
struct JoinLayer : Layer {
  Kind kind;
  int64_t hidden;
  int64_t matrix_offset;  // Matrix [hidden, 2 * hidden]: embedding, hidden state
  Norm norm, hidden_norm;
};

// GELU with tanh, with the normal distribution function, and x * sigmoid(1.702 x).
enum class Activation : int64_t {
  kSilu = 0,
  kGelu = 1,
  kExactGelu = 2,
  kQuickGelu = 3,
  kRelu = 4,
  kReluSquared = 5
};

// Behind a feed-forward network: the layer's numbers of a token, times the activations of a gate,
// and what a second matrix makes of them is added; then all is times a factor.
struct Side {
  int64_t width, layer, layers;  // 0: none; which of the layers' numbers
  int64_t gate, down;            // Matrix [width, hidden], [hidden, width]
  double gate_scale;             // of the gate's outputs, before the activation
  double factor;                 // of the hidden states behind the block; 0: none
  Residual residual;
};

struct FeedForwardLayer : Layer {
  Kind kind;
  int64_t hidden, wide;
  int64_t gated;     // 1: panels of gate and up alternate, of experts too
  Activation activation;
  int64_t parallel;  // 1: what is normed is the input of the attention before
  // Matrices. Of a mixture of experts, each gated and `wide`, int64 [experts]: where each one's
  // Matrices are from the layer; all that may be rounded for one of them is rounded for the others.
  int64_t up, down;
  int64_t experts, chosen;  // of a layer, of a token
  int64_t renormalized;     // 1: a token's probabilities are divided by their sum
  int64_t sigmoid;          // 1: of each logit by itself
  int64_t choice_bias;      // float32 [experts], added to probabilities for the choice alone
  int64_t groups, chosen_groups, best_of_group;  // of experts; at most 64
  int64_t router;           // Matrix [experts, hidden]; with a shared_gate one row more
  // Matrices of a gated network [shared] that every token takes besides; 0: none.
  int64_t shared, shared_up, shared_down;
  int64_t shared_gate;      // 1: its output is times the sigmoid of the router's last logit
  int64_t scaled_inputs;    // 1: the inputs of experts are times their factors, not their outputs
  int64_t expert_scales;    // float32 [experts]: of each one's outputs; 0: none
  double scale;             // of the experts' outputs
  double limit;             // of gates, and of ups, which are 1 more; 0: none
  Norm norm;                // gamma 0: none
  // Where they have norms of their own, and `norm` is the router's: of the inputs and outputs of the
  // experts, and of the shared network.
  Norm expert_norm, expert_out_norm, shared_norm, shared_out_norm;
  Side side;
  Residual residual;
  LoraPair adapters;
};

struct HeadLayer : Layer {
  int64_t hidden;
  int64_t matrix_offset;  // Matrix [vocab, hidden]; 0: that of the embedding
  Norm norm;
  LoraPair adapters;
};

// The tokens of one step: int32 words [2 + 4 * capacity + wanted capacity], and where tokens see a
// prefix, keys behind their own, [capacity] more at the end.
struct BoundModel;
struct LayerTime;
class Peers;

struct Step {
  int32_t count, wanted;  // live tokens; rows whose logits are wanted
  const int32_t *token, *slot, *position, *rope;
  const int32_t* row;        // of the wanted ones
  const int32_t* last_seen;  // position of the last key that a token sees; only with a prefix
  // Of a rank that shares the model with others: layers' outputs are summed over the ranks, and of
  // the vocabulary it has the tokens from `first_token` on.
  Peers* peers = nullptr;
  int64_t first_token = 0, vocabulary = 0;
  const int32_t* kept = nullptr;  // see BoundModel
  int64_t slots = 0;
  const int32_t* tables = nullptr;  // see BoundModel
  int64_t table_width = 0;

  Step(const int32_t* words, int64_t capacity, int64_t size = 0)
      : count(words[0]),
        wanted(words[1]),
        token(words + 2),
        slot(token + capacity),
        position(slot + capacity),
        rope(position + capacity),
        row(rope + capacity),
        last_seen(size < 2 + 5 * capacity ? nullptr : words + size - capacity) {}

  // Of the slot of a token: the block of each chunk of its positions.
  const int32_t* blocks(int64_t t) const { return tables + slot[t] * table_width; }

  // True if `size` words name only what the model has, so that nothing is read or written beyond it.
  // `places`: adapter slots, of which -1 is the base model's; or nullptr.
  bool fits(const BoundModel& model, int64_t size, const int32_t* places) const;
};

// Keys and values of one layer, in blocks of kChunk positions, where those of other layers may lie
// between: each array begins again `block_bytes` behind, for the next block.
struct Cache {
  CacheType type;
  void *keys, *values;  // [kv_heads, 4, head_dim, 32], [kv_heads, head_dim / 32, 128, 32]
  float *key_scales, *value_scales;  // int8: [kv_heads, 128]
  int64_t block_bytes;
};

// A layer with what it computes with: the cache of an attention, the states of a recurrent layer, or the
// hidden states [capacity, hidden] of the tokens that are joined, and the adapter pool of a layer that
// adapters change.
struct BoundLayer {
  const void* block;
  Cache cache;
  const void* pool;
  int64_t pool_stride;    // numbers of an adapter slot
  int64_t pool_bfloat16;  // 1: upper halves of float32
  float* state;
  int64_t state_stride;  // numbers from a slot's to the next one's; behind all come the kept ones
  int64_t windowed;      // 1: the cache's blocks are those of BoundModel's window_tables
};

// Time of a rank's exchanges with its peers so far: nanoseconds, and of these those until
// the others had come too (not of a collective between machines), and bytes that the rank gave; and
// the last one.
struct ExchangeTime {
  int64_t calls, spent, waited, bytes, began, ended, last_waited;
};

// Work of a layer so far: nanoseconds, calls, tokens, keys that each of its tokens has seen,
// and keys of the sequences, each once a step; and the last call, on the clock that is steady.
struct LayerTime {
  int64_t spent, calls, tokens, seen, read, began, ended;
  ExchangeTime exchange;
};

// A model as a step takes it: embedding, `count` - 2 attention and feed-forward layers in turn, some
// of which may be none, head.
// The sizes bound what a step may name: see Step::fits.
struct BoundModel {
  int64_t count;
  const BoundLayer* layers;
  float softcap;  // that tanh keeps logits within; 0: none
  int64_t prefix;  // 1: a step says the last key that each token sees
  int64_t capacity, vocabulary, slots, positions, rope_rows, logit_rows, adapter_slots;
  Peers* peers;  // nullptr: one rank has the whole model
  int64_t first_token;
  LayerTime* times;  // [count]; nullptr: not recorded
  // [slots] a token of the step, behind which recurrent states are kept besides; -1: none.
  const int32_t* kept;
  // [slots, table_width]: the block of each chunk of a slot's positions, of `blocks`.
  const int32_t* tables;
  int64_t table_width, blocks;
  // The same of layers with a window, of so many positions at most: chunks before it may have none.
  // 0: all layers have the same blocks.
  int64_t window;
  const int32_t* window_tables;
  int64_t window_blocks;
};

struct TrainingKernels;

struct Kernels {
  const char* name;
  void (*embedding)(const EmbeddingLayer&, const Step&, Adapters, float* out);
  void (*attention)(const AttentionLayer&, const Step&, Adapters, const float* x,
                    const float* rope, Cache, float* out);
  void (*feed_forward)(const FeedForwardLayer&, const Step&, Adapters, const float* x,
                       float* out);
  void (*experts)(const FeedForwardLayer&, const Step&, const float* x, float* out);
  void (*recurrent)(const RecurrentLayer&, const Step&, Adapters, const float* x, float* state,
                    int64_t state_stride, float* out);
  void (*join)(const JoinLayer&, const Step&, const float* hidden, float* x);
  void (*head)(const HeadLayer&, const Matrix&, const Step&, Adapters, float softcap,
               const float* x, float* logits);  // softcap 0: none
  void (*linear)(const Matrix&, const float* x, int64_t rows, float* out);
  void (*widen)(const void* values, const uint16_t* scales, const uint16_t* minimums, int64_t rows,
                int64_t inputs, int64_t bits, int64_t group, int64_t stride, float* to);
  void (*pack_blocks)(const uint8_t* from, Format, int64_t rows, int64_t inputs, int64_t stride,
                      uint8_t* to);
  const TrainingKernels* training;
};

// Those in use.
const Kernels& kernels();

// Compilers that know AVX-VNNI, and whose assemblers know AMX.
#if defined(__x86_64__) && (__clang_major__ >= 12 || __GNUC__ >= 11)
#define AVX_VNNI 1
#define AMX 1
bool amx_works();  // of a processor that has AMX: its products are right
#endif

// Of these a library has those of its processor's kind.
extern const Kernels kAmx, kAvx512, kAvxVnni, kAvx2, kDotprod, kPortable, kReproducible;

}  // namespace lite_runner
