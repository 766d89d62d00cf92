#include "constraint.h"

#include "common.h"
#include "json.h"
#include "reasoning-budget.h"

#include <cctype>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

static std::string escape_regex(const std::string & text) {
    static const std::string special = ".^$|()*+?[]{}\\";
    std::string res;
    for (const char c : text) {
        if (special.find(c) != std::string::npos) {
            res += '\\';
        }
        res += c;
    }
    return res;
}

static std::string anchored(const std::string & pattern) {
    return (pattern.empty() || pattern.front() != '^' ? "^" : "") + pattern +
           (pattern.empty() || pattern.back() != '$' ? "$" : "");
}

// What the template already wrote of the reply. Some tokenizers put a space before a text, which is not part of it.
static std::vector<llama_token> tokens_written(const llama_vocab * vocab, const std::string & text) {
    std::vector<llama_token> res = common_tokenize(vocab, text, false, true);
    if (!res.empty()) {
        const std::string first = common_token_to_piece(vocab, res.front(), true);
        if (!first.empty() && std::isspace((unsigned char) first[0]) && !std::isspace((unsigned char) text[0])) {
            res.erase(res.begin());
        }
    }
    return res;
}

static llama_sampler * lazy_grammar(const llama_vocab * vocab, const char * grammar, const common_json & triggers) {
    std::vector<std::string>  patterns;
    std::vector<llama_token>  tokens;
    for (const auto & trigger : triggers) {
        const auto        type  = (common_grammar_trigger_type) trigger.at("type").get<int>();
        const std::string value = trigger.at("value").get<std::string>();
        switch (type) {
            case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:        tokens.push_back(trigger.at("token").get<int>()); break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:         patterns.push_back(escape_regex(value)); break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:      patterns.push_back(value); break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: patterns.push_back(anchored(value)); break;
            default: throw std::runtime_error("unknown kind of grammar trigger");
        }
    }
    std::vector<const char *> pointers;
    for (const auto & pattern : patterns) {
        pointers.push_back(pattern.c_str());
    }
    return llama_sampler_init_grammar_lazy_patterns(vocab, grammar, "root", pointers.data(), pointers.size(),
                                                    tokens.data(), tokens.size());
}

Constraint Constraint::from_grammar(const llama_vocab * vocab, const char * grammar) {
    Constraint res;
    res.grammar.reset(llama_sampler_init_grammar(vocab, grammar, "root"));
    return res;
}

Constraint::Constraint(const llama_vocab * vocab, const char * json) {
    const common_json spec    = common_json::parse(json);
    const std::string text    = spec.at("grammar").get<std::string>();
    const bool        is_lazy = spec.at("lazy").get<bool>();

    grammar.reset(is_lazy ? lazy_grammar(vocab, text.c_str(), spec.at("triggers"))
                          : llama_sampler_init_grammar(vocab, text.c_str(), "root"));
    if (!grammar) {
        return;
    }
    const auto written = tokens_written(vocab, spec.at("generation_prompt").get<std::string>());
    if (!is_lazy) {
        for (const llama_token token : written) {
            llama_sampler_accept(grammar.get(), token);
        }
        return;
    }
    const std::string start = spec.at("thinking_start").get<std::string>();
    std::vector<llama_tokens> ends;
    for (const auto & end : spec.at("thinking_ends")) {
        ends.push_back(common_tokenize(vocab, end.get<std::string>(), false, true));
    }
    if (start.empty() || ends.empty()) {
        return;
    }
    thinking.reset(common_reasoning_budget_init(vocab, { common_tokenize(vocab, start, false, true) }, ends,
                                                llama_tokens(), std::numeric_limits<int32_t>::max()));
    for (const llama_token token : written) {
        llama_sampler_accept(thinking.get(), token);
    }
}

// A tool call that the model only thinks about is none.
bool Constraint::applies() const {
    if (!thinking) {
        return true;
    }
    const auto state = common_reasoning_budget_get_state(thinking.get());
    return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
}

void Constraint::apply(llama_token_data_array & candidates) const {
    if (applies()) {
        llama_sampler_apply(grammar.get(), &candidates);
    }
}

void Constraint::accept(llama_token token) {
    const bool applied = applies(); // as of before this token
    if (thinking) {
        llama_sampler_accept(thinking.get(), token);
        // the end of the reasoning can be what the grammar waits for
        const bool is_done = common_reasoning_budget_get_state(thinking.get()) == REASONING_BUDGET_DONE;
        const llama_tokens * end = is_done && !applied ? common_reasoning_budget_get_end_match(thinking.get()) : nullptr;
        if (end) {
            for (const llama_token each : *end) {
                llama_sampler_accept(grammar.get(), each);
            }
        }
    }
    if (applied) {
        llama_sampler_accept(grammar.get(), token);
    }
}
