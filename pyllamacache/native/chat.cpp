// Chat templates, tool calls and schemas of llama-common, as JSON in and JSON out. No policy.
#include "shim.h"

#include "guard.h"

#include "chat.h"
#include "common.h"
#include "json.h"
#include "log.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

struct plc_chat {
    common_chat_templates_ptr templates;
    std::string               bos;
    mutable std::mutex        mutex; // rendering walks values that a template's literals share
};

struct plc_chat_reply {
    common_chat_session session;
    common_chat_msg     before; // as of the last call
};

static char * copied(const std::string & text) {
    char * res = static_cast<char *>(std::malloc(text.size() + 1));
    if (res) {
        std::memcpy(res, text.c_str(), text.size() + 1);
    }
    return res;
}

// Runs body with a stack for stack_len bytes of a caller's text. What it throws comes out as *error.
template <typename R, typename F> static R reported(size_t stack_len, char ** error, F && body) noexcept {
    R res {};
    *error = nullptr;
    with_stack_for("chat", stack_len, [&]() noexcept {
        try {
            res = body();
        } catch (const std::exception & err) {
            *error = copied(err.what());
        } catch (...) {
            *error = copied("unknown exception");
        }
    });
    if (!res && !*error) {
        *error = copied("out of memory");
    }
    return res;
}

void plc_text_free(char * text) noexcept { std::free(text); }

plc_chat * plc_chat_new(const llama_model * model, const char * source, const char * bos, const char * eos,
                        char ** error) noexcept {
    static std::once_flag once;
    // llama-common writes to the standard streams, and texts of messages are among what it writes
    std::call_once(once, [] { common_log_set_verbosity_thold(-1); });
    return reported<plc_chat *>(1 << 16, error, [&]() -> plc_chat * {
        auto res       = std::make_unique<plc_chat>();
        res->templates = common_chat_templates_init(model, source ? source : "", bos ? bos : "", eos ? eos : "");
        if (bos) {
            res->bos = bos;
        } else if (model) {
            const llama_vocab * vocab = llama_model_get_vocab(model);
            const llama_token   id    = llama_vocab_bos(vocab);
            res->bos = id == LLAMA_TOKEN_NULL ? "" : common_token_to_piece(vocab, id, true);
        }
        return res.release();
    });
}

void plc_chat_free(plc_chat * chat) noexcept {
    guarded("plc_chat_free", 0, [&] {
        delete chat;
        return 0;
    });
}

char * plc_chat_facts(const plc_chat * chat, char ** error) noexcept {
    return reported<char *>(0, error, [&] {
        common_json caps = common_json::object();
        for (const auto & [name, has] : common_chat_templates_get_caps(chat->templates.get())) {
            caps[name] = has;
        }
        common_json facts = common_json::object();
        facts["source"]   = common_chat_templates_source(chat->templates.get());
        facts["is_own"]   = common_chat_templates_was_explicit(chat->templates.get());
        facts["caps"]     = std::move(caps);
        return copied(facts.dump());
    });
}

using Parts   = std::vector<jinja::string_part>;
using Renders = std::vector<Parts>;

static common_chat_templates_inputs inputs_of(const common_json & request, Renders & renders) {
    common_chat_templates_inputs res;
    res.messages              = common_chat_msgs_parse_oaicompat(request.at("messages"));
    res.tools                 = common_chat_tools_parse_oaicompat(request.at("tools"));
    res.tool_choice           = common_chat_tool_choice_parse_oaicompat(request.at("tool_choice").get<std::string>());
    res.parallel_tool_calls   = request.at("parallel_tool_calls").get<bool>();
    res.enable_thinking       = request.at("enable_thinking").get<bool>();
    res.add_generation_prompt = request.at("add_generation_prompt").get<bool>();
    res.reasoning_format      = COMMON_REASONING_FORMAT_DEEPSEEK;
    res.renders               = &renders;
    res.now                   = std::chrono::system_clock::time_point(
        std::chrono::seconds(request.at("now_s").get<int64_t>()));
    if (!request.at("json_schema").is_null()) {
        res.json_schema = request.at("json_schema").dump();
    }
    for (const auto & item : request.at("template_kwargs").items()) {
        res.chat_template_kwargs[item.key()] = item.value().dump();
    }
    return res;
}

static size_t common_length(const std::string & a, size_t start, const std::string & b) {
    size_t n = 0;
    while (start + n < a.size() && n < b.size() && a[start + n] == b[n]) {
        ++n;
    }
    return n;
}

// A prompt is one of the renderings, perhaps without the token at its front, perhaps with something added by its
// template's handler: the runs of the one that agrees longest, cut to where it does.
static common_json parts_of(const Renders & renders, const std::string & prompt, const std::string & bos) {
    const Parts * best   = nullptr;
    size_t        n_best = 0;
    size_t        skip   = 0;
    for (const Parts & parts : renders) {
        std::string text;
        for (const auto & part : parts) {
            text += part.val;
        }
        for (const size_t start : { size_t(0), text.compare(0, bos.size(), bos) == 0 ? bos.size() : size_t(0) }) {
            const size_t n = common_length(text, start, prompt);
            if (n > n_best || !best) {
                best   = &parts;
                n_best = n;
                skip   = start;
            }
        }
    }
    common_json res = common_json::array();
    const auto  add = [&](bool is_input, size_t n_bytes) {
        if (n_bytes) {
            res.push_back(common_json::array({ is_input, (int64_t) n_bytes }));
        }
    };
    size_t left = n_best;
    for (size_t i = 0; best && i < best->size() && left; ++i) {
        const size_t skipped = std::min(skip, (*best)[i].val.size());
        const size_t n       = std::min(left, (*best)[i].val.size() - skipped);
        skip -= skipped;
        left -= n;
        add((*best)[i].is_input, n);
    }
    add(false, prompt.size() - n_best);
    return res;
}

static common_json constraint_of(const common_chat_session & session) {
    if (session.grammar().empty()) {
        return nullptr;
    }
    common_params_sampling sampling;
    session.apply_sampling(sampling);
    common_json triggers = common_json::array();
    for (const auto & trigger : sampling.grammar_triggers) {
        common_json each = common_json::object();
        each["type"]     = (int) trigger.type;
        each["value"]    = trigger.value;
        each["token"]    = trigger.token;
        triggers.push_back(std::move(each));
    }
    common_json res          = common_json::object();
    res["grammar"]           = session.grammar();
    res["lazy"]              = sampling.grammar_lazy;
    res["triggers"]          = std::move(triggers);
    res["generation_prompt"] = session.generation_prompt();
    res["thinking_start"]    = session.thinking_start_tag();
    res["thinking_ends"]     = session.thinking_end_tags();
    return res;
}

char * plc_chat_render(plc_chat * chat, const llama_model * model, const char * request, plc_chat_reply ** reply,
                       char ** error) noexcept {
    return reported<char *>(1 << 16, error, [&] {
        std::lock_guard<std::mutex> guard(chat->mutex);
        Renders     renders;
        const auto  inputs = inputs_of(common_json::parse(request), renders);
        common_json res    = common_json::object();
        std::unique_ptr<plc_chat_reply> made;
        if (!reply) {
            res["prompt"] = common_chat_templates_apply(chat->templates.get(), inputs).prompt;
        } else {
            made = std::make_unique<plc_chat_reply>();
            made->session =
                common_chat_session(chat->templates.get(), model ? llama_model_get_vocab(model) : nullptr, inputs);
            made->before.role        = "assistant";
            res["prompt"]            = made->session.prompt();
            res["generation_prompt"] = made->session.generation_prompt();
            res["stops"]             = made->session.additional_stops();
            res["constraint"]        = constraint_of(made->session);
        }
        res["parts"] = parts_of(renders, res.at("prompt").get<std::string>(), chat->bos);
        char * text = copied(res.dump());
        if (text && reply) {
            *reply = made.release(); // not before: a caller that gets an error gets nothing to free
        }
        return text;
    });
}

static common_json delta_of(const common_chat_msg_diff & diff) {
    common_json res          = common_json::object();
    res["reasoning_content"] = diff.reasoning_content_delta;
    res["content"]           = diff.content_delta;
    if (diff.tool_call_index != std::string::npos) {
        common_json call  = common_json::object();
        call["index"]     = (int64_t) diff.tool_call_index;
        call["id"]        = diff.tool_call_delta.id;
        call["name"]      = diff.tool_call_delta.name;
        call["arguments"] = diff.tool_call_delta.arguments;
        res["tool_call"]  = std::move(call);
    }
    return res;
}

static common_json message_of(const common_chat_msg & message) {
    common_json calls = common_json::array();
    for (const auto & each : message.tool_calls) {
        common_json call  = common_json::object();
        call["id"]        = each.id;
        call["name"]      = each.name;
        call["arguments"] = each.arguments;
        calls.push_back(std::move(call));
    }
    common_json res          = common_json::object();
    res["content"]           = message.render_content();
    res["reasoning_content"] = message.reasoning_content;
    res["tool_calls"]        = std::move(calls);
    return res;
}

char * plc_chat_feed(plc_chat_reply * reply, const char * text, size_t text_len, int32_t is_last,
                     char ** error) noexcept {
    return reported<char *>(1 << 16, error, [&] {
        const common_chat_input chunk(std::string(text, text_len));
        const common_chat_msg & now = is_last ? reply->session.finish(chunk) : reply->session.feed(chunk);
        common_json deltas = common_json::array();
        for (const auto & diff : common_chat_msg_diff::compute_diffs(reply->before, now)) {
            deltas.push_back(delta_of(diff));
        }
        reply->before   = now;
        common_json res = common_json::object();
        res["message"]  = message_of(now);
        res["deltas"]   = std::move(deltas);
        return copied(res.dump());
    });
}

void plc_chat_reply_free(plc_chat_reply * reply) noexcept {
    guarded("plc_chat_reply_free", 0, [&] {
        delete reply;
        return 0;
    });
}
